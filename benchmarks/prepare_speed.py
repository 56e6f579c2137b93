"""Stage 1 over many conversations: time and the most memory held by all its processes.

Usage: python benchmarks/prepare_speed.py MODEL FOLDER [--conversations N] [--workers N]
Writes FOLDER/conversations.jsonl (three turns, about 500 tokens each, random words of the
project's own prompts) once, runs 01 on it, prints a JSON line.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def make_data(path: Path, count: int) -> None:
    texts = (ROOT / "configs/prompts/train.jsonl").read_text().splitlines()
    words = sorted({w for t in texts for w in json.loads(t)["messages"][-1]["content"].split()})
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    with open(path, "w", encoding="utf-8") as f:
        for n in range(count):
            messages = []
            for _ in range(3):
                messages.append({"role": "user", "content": text(10, 60)})
                messages.append({"role": "assistant", "content": text(20, 140)})
            f.write(json.dumps({"id": f"c{n}", "messages": messages}) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("folder", type=Path)
    p.add_argument("--conversations", type=int, default=100_000)
    p.add_argument("--workers", type=int, default=2)
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    data = a.folder / f"conversations-{a.conversations}.jsonl"
    if not data.exists():
        make_data(data, a.conversations)
    out = a.folder / "prepared"
    command = [sys.executable, str(ROOT / "01_prepare_data.py"), "--model-path", a.model]
    command += ["--dataset", str(data), "--output-dir", str(out), "--overwrite"]
    began, most = time.monotonic(), 0
    process = psutil.Popen([*command, "--workers", str(a.workers)], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        held = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                held += one.memory_full_info().pss
            except psutil.Error:  # has just ended
                continue
        most = max(most, held)
        time.sleep(1)
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"error: 01 ended with {process.returncode}")
    counts = json.loads((out / "data_config.json").read_text())["counts"]
    found = {"conversations": a.conversations, "tokens": counts["tokens"]}
    found |= {"workers": a.workers, "seconds": round(seconds, 1)}
    found |= {
        "tokens_per_second": round(counts["tokens"] / seconds),
        "peak_gb": round(most / 1e9, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
