"""Stage 3 at 100,000 samples: host memory, and how long a resume takes to begin.

    run      all of them, 8 tokens each, tiny Llama
    resume   503 tokens each, all but a few done

`resume` lets 03 finish one pass, adds the other passes' files (empty ones of the right size,
which is what a resume looks at) and journal lines, and times the next start until the
verifier begins to load. Peak memory is the process's own (ru_maxrss).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.states.files import StatesFormat, file_bytes, hidden_file
from tests.tiny_models import make_llama


def make_data(folder: Path, count: int, tokens: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    mask = "[" + "1," * (tokens - 1) + "1]"
    with open(folder / "tokenized_data.jsonl", "w") as f:
        for n in range(count):
            ids = ",".join(map(str, rng.integers(2, 512, tokens).tolist()))
            f.write(f'{{"id":"s{n}","input_ids":[{ids}],"loss_mask":{mask}}}\n')


def command(folder: Path, out: Path) -> list[str]:
    return [
        sys.executable, str(ROOT / "03_extract_hidden_states.py"),
        "--model-path", str(folder / "model"), "--prepared-data", str(folder / "prepared"),
        "--output-dir", str(out), "--max-seq-len", "1024", "--max-batch-tokens", "1024",
        "--storage-dtype", "fp8",
    ]  # fmt: skip


def finish_all_but(out: Path, left: int) -> None:
    """Give the batches of the plan, all but the last `left`, files and journal lines."""
    settings = json.loads((out / "data_config.json").read_text())["settings"]
    form = StatesFormat(len(settings["layers"]), settings["hidden_size"], settings["dtype"])
    lengths = {int(i): n for i, n in json.loads((out / "sample_lengths.json").read_text()).items()}
    units = json.loads((out / "plan.json").read_text())["units"]
    with open(out / "journal.jsonl", "w") as journal:
        for unit, members in enumerate(units[: len(units) - left]):
            for i in members:
                path = hidden_file(out, i)
                path.parent.mkdir(exist_ok=True)
                with open(path, "wb") as f:
                    f.truncate(file_bytes(lengths[i], form))
            sums = {str(i): "0" * 32 for i in members}
            entry = {"unit": unit, "seconds": 0.01, "checksums": sums, "missing": {}}
            journal.write(json.dumps(entry) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=["run", "resume"])
    p.add_argument("samples", nargs="?", type=int, default=100_000)
    args = p.parse_args()
    what, count = args.what, args.samples
    folder = Path(tempfile.mkdtemp())
    out = folder / "hidden"
    make_llama(folder / "model")
    make_data(folder / "prepared", count, 8 if what == "run" else 503)
    found: dict = {"what": what, "samples": count}
    if what == "resume":
        began = time.monotonic()
        process = subprocess.Popen(command(folder, out), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if "in vLLM ..." in line:
                found["first_start_s"] = round(time.monotonic() - began, 1)
            if "first batch agrees" in line:
                process.send_signal(signal.SIGTERM)
        process.wait()
        finish_all_but(out, 3)
    began = time.monotonic()
    process = subprocess.Popen(command(folder, out), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        last = line.strip()
        if "in vLLM ..." in line:
            found["start_s"] = round(time.monotonic() - began, 1)
    _, status, usage = os.wait4(process.pid, 0)
    found |= {
        "exit": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - began, 1),
        "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2),
        "last_line": last,
    }
    print(json.dumps(found), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
