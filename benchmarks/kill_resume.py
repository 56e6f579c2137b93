"""Stage 3 killed with SIGKILL at random moments and resumed: is every file an unbroken run's?

Of a tiny random Llama, on this machine.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tiny_models import make_llama, make_rows

BUDGET = 256  # tokens a pass: some 90 passes


def command(folder: Path, out: Path) -> list[str]:
    return [
        sys.executable, str(ROOT / "03_extract_hidden_states.py"),
        "--model-path", str(folder / "model"), "--prepared-data", str(folder / "prepared"),
        "--output-dir", str(out), "--max-seq-len", "256", "--max-batch-tokens", str(BUDGET),
    ]  # fmt: skip


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}


def journal_lines(out: Path) -> int:
    path = out / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("kills", nargs="?", type=int, default=20)
    p.add_argument("seed", nargs="?", type=int, default=0)
    args = p.parse_args()
    kills, rng = args.kills, random.Random(args.seed)
    folder = Path(tempfile.mkdtemp())
    make_llama(folder / "model")
    (folder / "prepared").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in make_rows(240))
    (folder / "prepared" / "tokenized_data.jsonl").write_text(rows)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command(folder, folder / "whole"), check=True, **quiet)  # type: ignore[call-overload]
    whole = files(folder / "whole")
    passes = journal_lines(folder / "whole")
    same = 0
    for n in range(kills):
        out = folder / f"killed-{n}"
        until, pause = rng.randrange(passes), rng.random() * 0.05
        process = subprocess.Popen(command(folder, out), **quiet)  # type: ignore[call-overload]
        while process.poll() is None and journal_lines(out) < until:
            time.sleep(0.001)
        time.sleep(pause if until else rng.random() * 15)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        done = journal_lines(out)
        partial = len(list(out.rglob("*.partial")))
        subprocess.run(command(folder, out), check=True, **quiet)  # type: ignore[call-overload]
        equal = files(out) == whole and not list(out.rglob("*.partial"))
        same += equal
        found = {"kill": n, "passes_done": done, "of": passes, "partial_files": partial}
        print(json.dumps(found | {"equal": equal}), flush=True)
        shutil.rmtree(out)
    print(json.dumps({"kills": kills, "equal": same, "files": len(whole)}), flush=True)
    shutil.rmtree(folder)
    sys.exit(same != kills)


if __name__ == "__main__":
    main()
