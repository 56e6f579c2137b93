"""The verifier: config, weight files, norm and head, decoder layers, vLLM engine."""
