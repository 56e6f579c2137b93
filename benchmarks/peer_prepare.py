"""Stage 1 beside `speculators prepare-data` on the same conversations and tokenizer.

The rows of DATA have `conversations`, the one form that theirs takes.
Theirs renders through a running vLLM server, which this starts on this machine (its start is not
counted). Prints a JSON line: both times; of their rows, one per turn, how many are a prefix of
one of ours, id for id; and over those, the positions where the masks differ, by their token.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import ROOT, must, served, show

MAX_SEQ_LEN = 2048


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model")
    p.add_argument("data", type=Path)
    p.add_argument("folder", type=Path)
    args = p.parse_args()
    model, data, folder = args.model, args.data, args.folder
    folder.mkdir(parents=True, exist_ok=True)
    ours_s = timed(
        folder / "ours.log", ROOT / "01_prepare_data.py", "--model-path", model, "--dataset", data,
        "--max-seq-len", MAX_SEQ_LEN, "--overwrite", "--output-dir", folder / "ours",
    )  # fmt: skip
    server = (
        "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager",
        "--max-model-len", MAX_SEQ_LEN, "--enable-scale-out",
    )  # fmt: skip
    with served(folder / "server.log", *server) as address:
        theirs_s = timed(
            folder / "theirs.log", "-m", "speculators", "prepare-data", "--model", model,
            "--data", data, "--output", folder / "theirs", "--overwrite",
            "--seq-length", MAX_SEQ_LEN, "--render-endpoint", address,
        )  # fmt: skip
    show(**compare(folder, model), ours_s=round(ours_s, 1), theirs_s=round(theirs_s, 1))


def timed(log: Path, *command: Any) -> float:
    """Seconds that a script takes."""
    started = time.monotonic()
    must(log, *command)
    return time.monotonic() - started


def compare(folder: Path, model: str) -> dict[str, Any]:
    from datasets import load_from_disk
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = (folder / "ours" / "tokenized_data.jsonl").read_text().splitlines()
    ours = [json.loads(x) for x in lines]
    turns = {}  # the ids up to each answer's end → its first position and the one after it
    for sample in ours:
        ids, mask = sample["input_ids"], sample["loss_mask"]
        closed = [*mask, 0]
        ends = [n + 1 for n, m in enumerate(mask) if m and not closed[n + 1]]
        for end in ends:
            first = end
            while mask[first - 1]:
                first -= 1
            turns[tuple(ids[:end])] = (first, end)
    rows = load_from_disk(str(folder / "theirs"))
    same = 0
    differ: Counter[str] = Counter()
    for row in rows:
        ids, mask = ([int(x) for x in row[key]] for key in ("input_ids", "loss_mask"))
        known = next((n for n in range(len(ids), 0, -1) if tuple(ids[:n]) in turns), None)
        if known is None:
            continue
        same += 1
        first, end = turns[tuple(ids[:known])]
        for n, m in enumerate(mask):
            if m != (first <= n < end):
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
