"""Difference in acceptance length between two drafts on the same prompts.

Usage: python benchmarks/paired_acceptance.py EVALUATION_A EVALUATION_B

Both are folders of tools/evaluate_draft.py over the same prompts; positive where B is better. The
interval is a bootstrap
over prompts, each drawn with both drafts' counts, so that easy prompts do not blur it.
"""

import json
import random
import sys
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: paired_acceptance.py EVALUATION_A EVALUATION_B")
    a, b = (json.loads((Path(p) / "result.json").read_text())["prompts"] for p in sys.argv[1:3])
    if a.keys() != b.keys():
        sys.exit("error: the evaluations are of different prompts")
    pairs = [(*a[k], *b[k]) for k in a if a[k][0] and b[k][0]]

    def difference(picked: list) -> float:
        passes_a, tokens_a, passes_b, tokens_b = map(sum, zip(*picked, strict=True))
        return tokens_b / passes_b - tokens_a / passes_a

    rng = random.Random(0)
    draws = sorted(difference(rng.choices(pairs, k=len(pairs))) for _ in range(4000))
    found = {
        "prompts": len(pairs),
        "drafts": [sum(p[0] for p in pairs), sum(p[2] for p in pairs)],
        "tokens_a_draft": [
            round(sum(p[1] for p in pairs) / sum(p[0] for p in pairs), 4),
            round(sum(p[3] for p in pairs) / sum(p[2] for p in pairs), 4),
        ],
        "difference": round(difference(pairs), 4),
        "interval_95": [round(draws[99], 4), round(draws[3899], 4)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
