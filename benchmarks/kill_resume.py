"""Stage 3 killed with SIGKILL at random moments and resumed: is every file an uninterrupted run's?

Of a tiny random Llama, on this machine.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, must, show, start, wait_until, write_jsonl
from common.states.journal import read_entries
from tests.tiny_models import make_llama, make_rows

MAX_BATCH_TOKENS = 256  # some 90 batches


def command(folder: Path, out: Path) -> list[object]:
    return [
        ROOT / "03_extract_hidden_states.py", "--model-path", folder / "model",
        "--prepared-data", folder / "prepared", "--output-dir", out,
        "--max-seq-len", 256, "--max-batch-tokens", MAX_BATCH_TOKENS,
    ]  # fmt: skip


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*.safetensors"))}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("kills", nargs="?", type=int, default=20)
    p.add_argument("seed", nargs="?", type=int, default=0)
    args = p.parse_args()
    rng = random.Random(args.seed)
    folder = Path(tempfile.mkdtemp())
    make_llama(folder / "model")
    write_jsonl(folder / "prepared" / "tokenized_data.jsonl", make_rows(240))
    log = folder / "extract.log"
    must(log, *command(folder, folder / "uninterrupted"))
    expected = files(folder / "uninterrupted")
    batches = len(read_entries(folder / "uninterrupted"))
    same = 0
    for n in range(args.kills):
        out = folder / f"killed-{n}"
        kill_after, pause = rng.randrange(batches), rng.random() * 0.05
        process = start(log, *command(folder, out))
        wait_until(lambda: len(read_entries(out)) >= kill_after, process, 0.001)  # noqa: B023
        time.sleep(pause if kill_after else rng.random() * 15)
        process.kill()
        process.wait()
        done = len(read_entries(out))
        partial = len(list(out.rglob("*.partial")))
        must(log, *command(folder, out))
        equal = files(out) == expected and not list(out.rglob("*.partial"))
        same += equal
        show(kill=n, batches_done=done, of=batches, partial_files=partial, equal=equal)
        shutil.rmtree(out)
    show(kills=args.kills, equal=same, files=len(expected))
    shutil.rmtree(folder)
    sys.exit(same != args.kills)


if __name__ == "__main__":
    main()
