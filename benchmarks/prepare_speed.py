"""Stage 1 over many conversations: time and the most memory held by all its processes.

Usage: python benchmarks/prepare_speed.py MODEL FOLDER [--conversations N] [--workers N]
Writes FOLDER/conversations.jsonl (three turns, about 500 tokens each, random words of the
project's own prompts) once, runs 01 on it, prints a JSON line.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, finish, show, start, write_jsonl


def conversations(count: int) -> Iterator[dict]:
    texts = (ROOT / "configs/prompts/train.jsonl").read_text().splitlines()
    words = sorted({w for t in texts for w in json.loads(t)["messages"][-1]["content"].split()})
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    for n in range(count):
        messages = []
        for _ in range(3):
            messages.append({"role": "user", "content": text(10, 60)})
            messages.append({"role": "assistant", "content": text(20, 140)})
        yield {"id": f"c{n}", "messages": messages}


def memory(process: psutil.Process) -> int:
    """Bytes held by a process and its children; what they share counts once."""
    held = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            held += one.memory_full_info().pss
        except psutil.Error:  # has just ended
            continue
    return held


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("folder", type=Path)
    p.add_argument("--conversations", type=int, default=100_000)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    data = args.folder / f"conversations-{args.conversations}.jsonl"
    if not data.exists():
        write_jsonl(data, conversations(args.conversations))
    out, log = args.folder / "prepared", args.folder / "prepare.log"
    started, most = time.monotonic(), 0
    process = start(
        log, ROOT / "01_prepare_data.py", "--model-path", args.model, "--dataset", data,
        "--output-dir", out, "--overwrite", "--workers", args.workers,
    )  # fmt: skip
    while process.poll() is None:
        most = max(most, memory(psutil.Process(process.pid)))
        time.sleep(1)
    seconds = time.monotonic() - started
    finish(process, log)
    tokens = json.loads((out / "data_config.json").read_text())["counts"]["tokens"]
    show(
        conversations=args.conversations,
        tokens=tokens,
        workers=args.workers,
        seconds=round(seconds, 1),
        tokens_per_second=round(tokens / seconds),
        peak_gb=round(most / 1e9, 2),
    )


if __name__ == "__main__":
    main()
