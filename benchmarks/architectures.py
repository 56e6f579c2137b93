"""Stage 3's states of every family of verifier on this machine, against transformers.

Usage: python benchmarks/architectures.py [--tp-size N...] [NAME...]
NAME is one of tests/tiny_models.py, default all.

The checks of tests/test_architectures.py, with the samples in a second order of batches. One JSON
line per family and size.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, finish, show, start, write_jsonl
from tests.test_architectures import (
    LOGPROB_GATE,
    ORDER_GATE,
    ROWS,
    STATES_GATE,
    logprob_difference,
    median_error,
    transformers_states,
)
from tests.tiny_models import ARCHITECTURES


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    p.add_argument("--tp-size", type=int, nargs="+", default=[1])
    a = p.parse_args()
    for name in a.names:
        folder = Path(tempfile.mkdtemp())
        path = ARCHITECTURES[name](folder / "model")
        write_jsonl(folder / "tokenized_data.jsonl", ROWS)
        expected = transformers_states(path)
        for ranks in a.tp_size:
            show(**check(name, folder, ranks, expected))


def check(name: str, folder: Path, ranks: int, expected: Any) -> dict[str, Any]:
    from common.states.files import hidden_file, read_hidden
    from common.verifier.config import load_verifier

    path = folder / "model"
    model = load_verifier(str(path))
    n = model.num_layers
    layers = [1, 3, n - 2, n - 1]
    side_by_side = torch.cuda.device_count() >= 2 * ranks

    def extract(out: Path, first_gpu: int, *more: object) -> subprocess.Popen[bytes]:
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(str(first_gpu + n) for n in range(ranks))}
        return start(
            out.with_suffix(".log"), ROOT / "03_extract_hidden_states.py", "--model-path", path,
            "--prepared-data", folder, "--output-dir", out, "--layers", *layers,
            "--max-seq-len", 256, "--gpu-memory-utilization", 0.05, "--tp-size", ranks, *more,
            env=os.environ | (gpus if side_by_side else {}),
        )  # fmt: skip

    def states_of(out: Path) -> list[torch.Tensor]:
        return [read_hidden(hidden_file(out, i))[0].float() for i in range(len(ROWS))]

    one, other = folder / f"one{ranks}", folder / f"other{ranks}"
    first = extract(one, 0, "--max-batch-tokens", 512)
    if not side_by_side:
        first.wait()
    second = extract(other, ranks, "--max-batch-tokens", 300, "--batch-size", 3)
    for process, out in ((first, one), (second, other)):
        finish(process, out.with_suffix(".log"))
    states, other_states = states_of(one), states_of(other)
    want, logprobs = expected
    found = {"model": model, "states": states, "logprobs": logprobs}
    last, before = logprob_difference(found, -1), logprob_difference(found, -2)
    errors = [
        median_error([x[:, k] for x in states], [w[:, layer] for w in want])
        for k, layer in enumerate(layers)
    ]
    order = median_error([x.flatten(0, 1) for x in other_states], [x.flatten(0, 1) for x in states])
    return {
        "architecture": name,
        "tensor_parallel_size": ranks,
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "default"),
        "error_by_layer": [round(e, 4) for e in errors],
        "logprobs_last": round(last, 4),
        "logprobs_layer_before": round(before, 4),
        "other_order": round(order, 5),
        "ok": max(errors) < STATES_GATE
        and last < min(LOGPROB_GATE, before / 10)
        and order < ORDER_GATE,
    }


if __name__ == "__main__":
    main()
