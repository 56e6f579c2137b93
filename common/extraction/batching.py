"""Plan of forward passes: which samples share one, made from the data alone."""

import bisect
import heapq

# vLLM's start-up profiling runs a sampler on max_num_seqs rows of the whole vocabulary:
# 2000 rows x 163840 float32 and a sort are 7 GB, 256 rows under 1 GB. Two passes are in
# vLLM's queue at a time, so one gets half of 256.
PASSES_IN_FLIGHT = 2
MAX_SAMPLES_A_PASS = 256 // PASSES_IN_FLIGHT

# Buffers of one pass's rows: on the GPU (one is filled while the other is copied out), and on
# the host (how far the writers may fall behind).
SLOTS = 2
RING = 4


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
        max_samples: most samples in one forward pass.
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


def deal_units(
    units: list[list[int]], lengths: dict[int, int], num_shards: int, shard: int
) -> list[list[int]]:
    """The passes of one shard of `num_shards`: whole passes, dealt by their tokens.

    Largest first to the shard with the fewest tokens, so that shards differ by one pass at
    most. A pass is the same in whichever shard it runs, and so are its files.
    """
    tokens = [sum(lengths[i] for i in unit) for unit in units]
    loads = [(0, n) for n in range(num_shards)]
    mine = []
    for u in sorted(range(len(units)), key=lambda u: (-tokens[u], u)):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + tokens[u], least))
        if least == shard:
            mine.append(u)
    return [units[u] for u in sorted(mine)]
