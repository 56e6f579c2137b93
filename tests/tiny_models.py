"""Tiny random verifiers for tests and for a first run on a new machine.

python -m tests.tiny_models FOLDER makes FOLDER/tiny-llama and FOLDER/rows.jsonl
(tokenized rows, a prompt and an answer each, that 01 passes through).
"""

import json
import random
import sys
from pathlib import Path

VOCAB = 512


def make_llama(path: Path, vocab_size: int = VOCAB) -> Path:
    """A random 8-layer Llama whose 4 heads divide by 2; real vLLM loads it in a second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)  # type: ignore[arg-type]
    return path


def make_rows(count: int, vocab_size: int = VOCAB) -> list[dict]:
    """Tokenized rows: a prompt of 3 to 59 random ids, then an answer that ends with id 1."""
    rng = random.Random(0)
    rows = []
    for n in range(count):
        prompt, answer = rng.randrange(3, 60), rng.randrange(2, 120)
        ids = [rng.randrange(2, vocab_size) for _ in range(prompt + answer - 1)] + [1]
        rows.append({"id": f"r{n}", "input_ids": ids, "loss_mask": [0] * prompt + [1] * answer})
    return rows


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_llama(folder / "tiny-llama")
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in make_rows(200)))
