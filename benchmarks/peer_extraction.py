"""speculators' extraction on the same samples: a vLLM server with its hidden-states connector,
and `speculators generate-offline-data` against it.

Usage: python benchmarks/peer_extraction.py MODEL DATA OUT [--layers 2 16 29 31]

DATA is a prepared folder of benchmarks/extraction.py, OUT a new folder on the RAM disk. The
server is started as speculators 0.9's launch_vllm.py does (4 API servers, 2 renderers), eager
as stage 3 is, prefix caching off; 64 samples warm it up. Layers are numbered as here (after
layer i; the peer's ids are i + 1). Prints one JSON line; its seconds are the client's own, from
the first request to the last file. Needs speculators, datasets and vLLM's server packages.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import finish, served, show, start
from common.data.samples import read_samples

CLIENT_LIMIT = 120  # seconds


def build_tokenizer(model: Path, folder: Path) -> None:
    """One word per id: the server wants a tokenizer for its one new token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {f"t{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def build_dataset(rows: list[list[int]], folder: Path) -> None:
    from datasets import Dataset

    fields = {
        "input_ids": rows,
        "loss_mask": [[1] * len(ids) for ids in rows],
        "seq_len": [len(ids) for ids in rows],
    }
    data = Dataset.from_dict(fields)
    data.set_format(type="torch")
    data.save_to_disk(str(folder))


def server_command(args: argparse.Namespace, states: Path, tokenizer: Path) -> list[object]:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in args.layers]}
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    return [
        "-m", "vllm.entrypoints.cli.main", "serve", args.model,
        "--speculative_config", json.dumps(speculative),
        "--kv_transfer_config", json.dumps(transfer), "--tokenizer", tokenizer,
        "--dtype", "bfloat16", "--max-model-len", 2304, "--max-num-batched-tokens", 8192,
        "--gpu-memory-utilization", 0.85, "--no-enable-prefix-caching", "--enforce-eager",
        "--generation-config", "vllm", "--api-server-count", 4, "--renderer-num-workers", 2,
    ]  # fmt: skip


def generate(args: argparse.Namespace, address: str, data: Path, out: Path, *more: object) -> float:
    """Seconds by the client's own account."""
    log = out.with_suffix(".log")
    client = start(
        log, "-m", "speculators", "generate-offline-data", "--model", args.model,
        "--endpoint", f"{address}/v1", "--preprocessed-data", data, "--output", out,
        "--concurrency", args.concurrency, *more,
        env=os.environ | {"NO_PROXY": "*", "no_proxy": "*", "COLUMNS": "250"},
    )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        client.wait(CLIENT_LIMIT)
    client.kill()
    found = re.search(r"Timing:\s+([\d.]+)s\s+elapsed", finish(client, log))
    if not found:
        sys.exit(f"error: {log}: the client has not told its time")
    return float(found[1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("data", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--layers", type=int, nargs="+", default=[2, 16, 29, 31])
    p.add_argument("--concurrency", type=int, default=32, help="requests; the client's default")
    args = p.parse_args()
    args.out.mkdir(parents=True)
    work = Path(tempfile.mkdtemp())
    rows = [s.input_ids.tolist() for s in read_samples(args.data)]
    build_tokenizer(args.model, work / "tokenizer")
    build_dataset(rows, work / "data")
    command = server_command(args, args.out / "stage", work / "tokenizer")
    with served(work / "server.log", *command) as address:
        warm = (args.out / "warm", "--max-samples", 64, "--fail-on-error")
        generate(args, address, work / "data", *warm)
        seconds = generate(args, address, work / "data", args.out / "hidden")
    sizes = [f.stat().st_size for f in (args.out / "hidden").glob("hs_*.safetensors")]
    tokens = sum(map(len, rows))
    show(
        what="speculators",
        tokens=tokens,
        seconds=seconds,
        tok_s=round(tokens / seconds),
        files=len(sizes),
        GB_s=round(sum(sizes) / 1e9 / seconds, 2),
        concurrency=args.concurrency,
    )
    shutil.rmtree(args.out)


if __name__ == "__main__":
    main()
