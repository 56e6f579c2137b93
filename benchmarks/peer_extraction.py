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
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.data.samples import read_samples

START_LIMIT, CLIENT_LIMIT = 240, 120  # seconds


def build_tokenizer(model: Path, folder: Path) -> None:
    """One word an id: the server wants a tokenizer for its one new token."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {f"t{i}": i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)


def build_dataset(rows: list[list[int]], folder: Path) -> None:
    from datasets import Dataset

    columns = {
        "input_ids": rows,
        "loss_mask": [[1] * len(ids) for ids in rows],
        "seq_len": [len(ids) for ids in rows],
    }
    data = Dataset.from_dict(columns)
    data.set_format(type="torch")
    data.save_to_disk(str(folder))


def start_server(a: argparse.Namespace, stage: Path, tokenizer: Path, log) -> subprocess.Popen:
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {
            "hf_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in a.layers]}
        },
    }
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(stage)},
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(a.model),
        "--speculative_config", json.dumps(speculative),
        "--kv_transfer_config", json.dumps(transfer), "--tokenizer", str(tokenizer),
        "--host", "127.0.0.1", "--port", str(a.port), "--dtype", "bfloat16",
        "--max-model-len", "2304", "--max-num-batched-tokens", "8192",
        "--gpu-memory-utilization", "0.85", "--no-enable-prefix-caching", "--enforce-eager",
        "--generation-config", "vllm", "--api-server-count", "4", "--renderer-num-workers", "2",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def wait_until_ready(server: subprocess.Popen, port: int) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and server.poll() is None:
        try:
            opener.open(f"http://127.0.0.1:{port}/v1/models", timeout=3).read()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit("error: the server did not come up")


def generate(a: argparse.Namespace, data: Path, out: Path, *more: str) -> float:
    """Seconds by the client's own account."""
    command = [
        sys.executable, "-m", "speculators", "generate-offline-data", "--model", str(a.model),
        "--endpoint", f"http://127.0.0.1:{a.port}/v1", "--preprocessed-data", str(data),
        "--output", str(out), "--concurrency", str(a.concurrency), *more,
    ]  # fmt: skip
    env = {**os.environ, "NO_PROXY": "*", "no_proxy": "*", "COLUMNS": "250"}
    result = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=CLIENT_LIMIT, check=False
    )
    text = result.stdout + result.stderr
    found = re.search(r"Timing:\s+([\d.]+)s\s+elapsed", text)
    if result.returncode or not found:
        sys.exit(f"error: the client failed: {text[-1500:]}")
    return float(found[1])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("data", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--layers", type=int, nargs="+", default=[2, 16, 29, 31])
    p.add_argument("--concurrency", type=int, default=32, help="the client's default")
    p.add_argument("--port", type=int, default=8011)
    a = p.parse_args()
    a.out.mkdir(parents=True)
    work = Path(tempfile.mkdtemp())
    rows = [s.input_ids.tolist() for s in read_samples(a.data)]
    build_tokenizer(a.model, work / "tokenizer")
    build_dataset(rows, work / "data")
    with open(work / "server.log", "w") as log:
        server = start_server(a, a.out / "stage", work / "tokenizer", log)
        try:
            wait_until_ready(server, a.port)
            generate(a, work / "data", a.out / "warm", "--max-samples", "64", "--fail-on-error")
            seconds = generate(a, work / "data", a.out / "hidden")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)
    sizes = [f.stat().st_size for f in (a.out / "hidden").glob("hs_*.safetensors")]
    tokens = sum(map(len, rows))
    found = {
        "what": "speculators",
        "tokens": tokens,
        "seconds": seconds,
        "tok_s": round(tokens / seconds),
        "files": len(sizes),
        "GB_s": round(sum(sizes) / 1e9 / seconds, 2),
        "concurrency": a.concurrency,
    }
    print(json.dumps(found), flush=True)
    shutil.rmtree(a.out)


if __name__ == "__main__":
    main()
