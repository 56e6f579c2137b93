"""Stage 3's states of every family of verifier on this machine, against transformers.

Usage: python benchmarks/architectures.py [--tp-size N] [NAME...]
NAME is one of tests/tiny_models.py, default all.

The checks of tests/test_architectures.py, but script 03 runs inside this process, which
saves importing vLLM ten times. One JSON line a family.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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


def script_03() -> Any:
    spec = importlib.util.spec_from_file_location("script_03", ROOT / "03_extract_hidden_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("names", nargs="*", default=list(ARCHITECTURES))
    p.add_argument("--tp-size", type=int, default=1)
    a = p.parse_args()
    extract = script_03()
    for name in a.names:
        folder = Path(tempfile.mkdtemp())
        print(json.dumps(check(extract, name, folder, a.tp_size)), flush=True)
    os._exit(0)


def check(extract: Any, name: str, folder: Path, ranks: int) -> dict[str, Any]:
    from common.hidden_files import hidden_file, read_hidden
    from common.verifier import load_verifier

    path = ARCHITECTURES[name](folder / "model")
    data = folder / "tokenized_data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    model = load_verifier(str(path))
    n = model.num_layers
    layers = [1, 3, n - 2, n - 1]

    def run(out: Path, *more: str):
        sys.argv = ["03", "--model-path", str(path), "--prepared-data", str(folder),
                    "--output-dir", str(out), "--layers", *map(str, layers), "--max-seq-len", "256",
                    "--gpu-memory-utilization", "0.05",
                    "--tp-size", str(ranks), *more]  # fmt: skip
        extract.main()
        return [read_hidden(hidden_file(out, i))[0].float() for i in range(len(ROWS))]

    states = run(folder / "one", "--max-batch-tokens", "512")
    other = run(folder / "other", "--max-batch-tokens", "300", "--batch-size", "3")
    want, logprobs = transformers_states(path)
    found = {"model": model, "states": states, "logprobs": logprobs}
    last, before = logprob_difference(found, -1), logprob_difference(found, -2)
    errors = [
        median_error([x[:, k] for x in states], [w[:, layer] for w in want])
        for k, layer in enumerate(layers)
    ]
    order = median_error([x.flatten(0, 1) for x in other], [x.flatten(0, 1) for x in states])
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
