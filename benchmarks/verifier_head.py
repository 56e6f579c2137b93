"""How long 03 takes to write the head of a verifier with Kimi-K2.5's vocabulary and hidden size.

Usage: python benchmarks/verifier_head.py FOLDER [--tp-size 2]

Four thin Llama layers between an embedding and a head of 163840 x 7168 in bfloat16 (4.7 GB), and
sixteen samples. Prints one JSON line: the seconds in which the ranks write it, the file's size, and
the peak memory of all of 03's processes together, files left out, while loading and after it.
"""

import argparse
import json
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, finish, show, start, write_jsonl
from tests.tiny_models import make_rows

VOCAB, HIDDEN, LAYERS, INTERMEDIATE = 163840, 7168, 4, 64


def make_verifier(path: Path) -> None:
    """Save a random Llama, a layer's matrices small but for the hidden size."""
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    rows = {"embed_tokens": 1.0, "lm_head": 0.02}

    def matrix(rows: int, columns: int, size: float) -> torch.Tensor:
        return torch.randn(rows, columns).mul_(size).to(torch.bfloat16)

    weights = {"model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in "qkv":
            weights[f"{at}self_attn.{name}_proj.weight"] = matrix(128, HIDDEN, 0.02)
        weights[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, 128, 0.02)
        weights[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE, 0.02)
        for name in ("gate", "up"):
            weights[f"{at}mlp.{name}_proj.weight"] = matrix(INTERMEDIATE, HIDDEN, 0.02)
    for name, size in rows.items():
        key = "lm_head.weight" if name == "lm_head" else f"model.{name}.weight"
        weights[key] = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16)
        for part in weights[key].split(8192):
            part.copy_(torch.randn(part.shape).mul_(size))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def memory(process: psutil.Process) -> int:
    """Bytes that a process and its children hold that are not of files."""
    total = 0
    for p in [process, *process.children(recursive=True)]:
        try:
            total += p.memory_info().rss - p.memory_info().shared
        except psutil.NoSuchProcess:
            continue
    return total


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--tp-size", type=int, default=2)
    a = p.parse_args()
    model, out, log = a.folder / "verifier", a.folder / "hidden", a.folder / "extract.log"
    if not model.exists():
        make_verifier(model)
    write_jsonl(a.folder / "prepared" / "tokenized_data.jsonl", make_rows(16))
    process = start(
        log, ROOT / "03_extract_hidden_states.py", "--model-path", model, "--prepared-data",
        a.folder / "prepared", "--output-dir", out, "--overwrite", "--tp-size", a.tp_size,
        "--layers", 0, 1, 2, 3, "--max-seq-len", 512, "--max-batch-tokens", 1024, cwd=ROOT,
    )  # fmt: skip
    peaks = {"loading": 0, "head": 0}

    def watch() -> None:
        while process.poll() is None:
            text = log.read_text()
            phase = "head" if "verifier loaded" in text else "loading"
            peaks[phase] = max(peaks[phase], memory(psutil.Process(process.pid)))
            time.sleep(0.05)

    thread = threading.Thread(target=watch)
    thread.start()
    text = finish(process, log)
    thread.join()
    found = re.search(r"verifier head: .*; ([0-9.]+) GB in (\S+)", text)
    assert found is not None, text
    show(tp_size=a.tp_size, head_gb=float(found[1]), written_in=found[2],
         peak_gb_while_loading=round(peaks["loading"] / 1e9, 2),
         peak_gb_after=round(peaks["head"] / 1e9, 2))  # fmt: skip


if __name__ == "__main__":
    main()
