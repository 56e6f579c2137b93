"""Stage 1 beside `speculators prepare-data` on the same conversations and tokenizer.

The rows of DATA have `conversations`, the one form that theirs takes.
Theirs renders through a running vLLM server, which this starts on this machine (its start is not
counted). Prints a JSON line: both rates; of their rows, a turn each: how many are a beginning of
one of ours, id for id; and over those, the places where the masks differ, by their token.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 2048


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "data", "folder"):
        p.add_argument(name)
    args = p.parse_args()
    model, data, folder = args.model, args.data, Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "01_prepare_data.py"), "--model-path", model]
    command += ["--dataset", data, "--max-seq-len", str(LONGEST), "--overwrite"]
    ours_s = timed([*command, "--output-dir", str(folder / "ours")])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    server += ["--port", str(port), "--host", "127.0.0.1", "--enforce-eager"]
    server += ["--max-model-len", str(LONGEST), "--enable-scale-out"]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(server, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/v1/models", process)
        theirs = [sys.executable, "-m", "speculators", "prepare-data", "--model", model]
        theirs += ["--data", data, "--output", str(folder / "theirs"), "--overwrite"]
        theirs += ["--seq-length", str(LONGEST), "--render-endpoint", url]
        theirs_s = timed(theirs)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    found: dict[str, Any] = compare(folder, model)
    found |= {"ours_s": round(ours_s, 1), "theirs_s": round(theirs_s, 1)}
    print(json.dumps(found))


def timed(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def wait_for(url: str, process: subprocess.Popen) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    sys.exit("error: the server ended; see server.log")


def compare(folder: Path, model: str) -> dict[str, Any]:
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (folder / "ours" / "tokenized_data.jsonl").read_text().splitlines()
    ours = [json.loads(x) for x in lines]
    turns = {}  # the ids up to each answer's end → the answer's places
    for sample in ours:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        closed = [*mask, 0]
        ends = [n + 1 for n, m in enumerate(mask) if m and not closed[n + 1]]
        for end in ends:
            start = end
            while mask[start - 1]:
                start -= 1
            turns[tuple(ids[:end])] = (start, end)
    rows = load_from_disk(str(folder / "theirs"))
    same = 0
    differ: Counter[str] = Counter()
    for row in rows:
        ids, mask = ([int(x) for x in row[key]] for key in ("input_ids", "loss_mask"))
        known = next((n for n in range(len(ids), 0, -1) if tuple(ids[:n]) in turns), None)
        if known is None:
            continue
        same += 1
        start, end = turns[tuple(ids[:known])]
        for n, m in enumerate(mask):
            if m != (start <= n < end):
                differ[repr(tokenizer.decode([ids[n]])) + (" theirs" if m else " ours")] += 1
    return {
        "our_samples": len(ours),
        "our_turns": len(turns),
        "their_rows": len(rows),
        "same_ids": same,
        "masks_differ_at": dict(differ.most_common(6)),
        "our_tokens": sum(len(s["input_ids"]) for s in ours),
        "their_tokens": sum(len(row["input_ids"]) for row in rows),
    }


if __name__ == "__main__":
    main()
