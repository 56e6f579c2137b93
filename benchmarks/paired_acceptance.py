"""Difference in acceptance length between two drafts on the same prompts.

Both are folders of tools/evaluate_draft.py over the same prompts; positive where B is better. The
interval is a bootstrap over prompts, each drawn with both drafts' counts, so that easy prompts do
not blur it.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import show


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("evaluation_a", type=Path)
    p.add_argument("evaluation_b", type=Path)
    args = p.parse_args()
    a, b = (
        json.loads((folder / "result.json").read_text())["prompts"]
        for folder in (args.evaluation_a, args.evaluation_b)
    )
    if a.keys() != b.keys():
        sys.exit("error: the evaluations are of different prompts")
    pairs = [(*a[k], *b[k]) for k in a if a[k][0] and b[k][0]]

    def lengths(picked: list) -> tuple[float, float]:
        """Tokens per draft (one is made for each forward pass of the verifier) of A and of B."""
        drafts_a, tokens_a, drafts_b, tokens_b = map(sum, zip(*picked, strict=True))
        return tokens_a / drafts_a, tokens_b / drafts_b

    def difference(picked: list) -> float:
        length_a, length_b = lengths(picked)
        return length_b - length_a

    rng = random.Random(0)
    draws = sorted(difference(rng.choices(pairs, k=len(pairs))) for _ in range(4000))
    show(
        prompts=len(pairs),
        drafts=[sum(p[0] for p in pairs), sum(p[2] for p in pairs)],
        tokens_per_draft=[round(length, 4) for length in lengths(pairs)],
        difference=round(difference(pairs), 4),
        interval_95=[round(draws[99], 4), round(draws[3899], 4)],
    )


if __name__ == "__main__":
    main()
