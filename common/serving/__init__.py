"""A draft in vLLM: generation, acceptance, parity with training."""
