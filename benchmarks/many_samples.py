"""Stage 3 at 100,000 samples: host memory, and how long a resume takes to start.

    run      all of them, 8 tokens each, tiny Llama
    resume   503 tokens each, all but a few done

`resume` lets 03 finish one batch, adds the other batches' files (of zeros in the right size,
which is what a resume looks at) and journal lines, and times the next start until the
verifier starts to load. Peak memory is the process's own (ru_maxrss).
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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, show
from common.manifest import MANIFEST
from common.states.files import StatesFormat, file_bytes, hidden_file
from common.states.journal import JOURNAL, Entry, read_plan
from tests.tiny_models import make_llama


def make_data(folder: Path, count: int, tokens: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    mask = "[" + "1," * (tokens - 1) + "1]"
    with open(folder / "tokenized_data.jsonl", "w") as f:
        for n in range(count):
            ids = ",".join(map(str, rng.integers(2, 512, tokens).tolist()))
            f.write(f'{{"id":"s{n}","input_ids":[{ids}],"loss_mask":{mask}}}\n')


def finish_all_but(out: Path, left: int) -> None:
    """Give the planned batches, all but the last `left`, files and journal lines."""
    settings = json.loads((out / MANIFEST).read_text())["settings"]
    form = StatesFormat(len(settings["layers"]), settings["hidden_size"], settings["dtype"])
    plan = read_plan(out)
    with open(out / JOURNAL, "w") as journal:
        for number, members in enumerate(plan.batches[:-left]):
            for i in members:
                path = hidden_file(out, i)
                path.parent.mkdir(exist_ok=True)
                with open(path, "wb") as f:
                    f.truncate(file_bytes(plan.lengths[i], form))
            journal.write(Entry(number, 0.01, dict.fromkeys(members, "0" * 32)).line())


def lines_of(process: subprocess.Popen[str]) -> Iterator[tuple[float, str]]:
    """What 03 prints, line by line, with the seconds since its start."""
    started = time.monotonic()
    assert process.stdout is not None
    for line in process.stdout:
        yield time.monotonic() - started, line.strip()


def extract(folder: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, str(ROOT / "03_extract_hidden_states.py"),
            "--model-path", str(folder / "model"), "--prepared-data", str(folder / "prepared"),
            "--output-dir", str(out), "--max-seq-len", "1024", "--max-batch-tokens", "1024",
            "--storage-dtype", "fp8",
        ],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("what", choices=["run", "resume"])
    p.add_argument("samples", nargs="?", type=int, default=100_000)
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp())
    out = folder / "hidden"
    make_llama(folder / "model")
    make_data(folder / "prepared", args.samples, 8 if args.what == "run" else 503)
    found: dict = {"what": args.what, "samples": args.samples}
    if args.what == "resume":
        process = extract(folder, out)
        for seconds, line in lines_of(process):
            if "in vLLM ..." in line:
                found["first_start_s"] = round(seconds, 1)
            if "first batch agrees" in line:
                process.send_signal(signal.SIGTERM)
        process.wait()
        finish_all_but(out, 3)
    started, last = time.monotonic(), ""
    process = extract(folder, out)
    for seconds, last in lines_of(process):
        if "in vLLM ..." in last:
            found["start_s"] = round(seconds, 1)
    _, status, usage = os.wait4(process.pid, 0)
    show(
        **found,
        exit=os.waitstatus_to_exitcode(status),
        seconds=round(time.monotonic() - started, 1),
        peak_gb=round(usage.ru_maxrss * 1024 / 1e9, 2),
        last_line=last,
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
