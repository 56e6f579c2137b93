"""Plan of forward passes: which samples share one, made from the data alone."""

import bisect

# vLLM's start-up profiling runs a sampler on max_num_seqs rows of the whole vocabulary:
# 2000 rows x 163840 float32 and a sort are 7 GB. 256 rows cost under 1 GB.
MAX_SAMPLES_A_PASS = 256


def plan_units(
    lengths: dict[int, int], max_tokens: int, max_samples: int = MAX_SAMPLES_A_PASS
) -> list[list[int]]:
    """Group samples into forward passes ("units") of at most `max_tokens` tokens.

    Best-fit decreasing: longest samples first, each into the fullest unit that still has
    room, so that budgets are full to the end. Depends on (index, length) only, never on
    what an earlier run finished. Every length must be at most `max_tokens`.

    Args:
        lengths: sample index → tokens.
        max_tokens: token budget of one forward pass.
        max_samples: most samples in one forward pass (vLLM's max_num_seqs).
    """
    max_samples = min(max_samples, MAX_SAMPLES_A_PASS)
    units: list[list[int]] = []
    open_units: list[tuple[int, int]] = []  # (tokens of room, unit), sorted
    for index, n in sorted(lengths.items(), key=lambda x: (-x[1], x[0])):
        if n > max_tokens:
            raise ValueError(f"sample {index} has {n} tokens, over the budget of {max_tokens}")
        at = bisect.bisect_left(open_units, (n, -1))
        if at == len(open_units):
            units.append([index])
            room, unit = max_tokens - n, len(units) - 1
        else:
            room, unit = open_units.pop(at)
            units[unit].append(index)
            room -= n
        if room > 0 and len(units[unit]) < max_samples:
            bisect.insort(open_units, (room, unit))
    return units
