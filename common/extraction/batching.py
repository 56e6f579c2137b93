"""Which samples share a forward pass: planned from the data alone."""

import bisect
import heapq
from dataclasses import dataclass

# vLLM's start-up profiling runs a sampler on max_num_seqs rows of the full vocabulary:
# 2000 rows x 163840 float32 and a sort are 7 GB, 256 rows under 1 GB. Two batches are in
# vLLM's queue at a time, so one gets half of 256.
BATCHES_IN_FLIGHT = 2
MAX_SAMPLES_PER_BATCH = 256 // BATCHES_IN_FLIGHT

# Buffers of one batch's rows: on the GPU (one is filled while the other is copied out), and on
# the host (how far the writers may fall behind).
DEVICE_BUFFERS = 2
HOST_BUFFERS = 4


@dataclass(frozen=True)
class Batch:
    """Samples of one forward pass, by their indices; number: its place in the plan."""

    number: int
    indices: list[int]


def make_batches(
    lengths: dict[int, int], max_tokens: int, max_samples: int = MAX_SAMPLES_PER_BATCH
) -> list[list[int]]:
    """Group samples into batches of at most `max_tokens` tokens.

    Best-fit decreasing: longest samples first, each into the fullest batch that still has
    room, so that budgets are full to the end. Depends on (index, length) only, never on
    what an earlier run finished. Every length must be at most `max_tokens`.

    Args:
        lengths: sample index → tokens.
        max_tokens: token budget of one forward pass.
        max_samples: most samples in one forward pass.
    """
    max_samples = min(max_samples, MAX_SAMPLES_PER_BATCH)
    batches: list[list[int]] = []
    with_room: list[tuple[int, int]] = []  # (tokens of room, batch), sorted
    for index, n in sorted(lengths.items(), key=lambda x: (-x[1], x[0])):
        if n > max_tokens:
            raise ValueError(f"sample {index} has {n} tokens, over the budget of {max_tokens}")
        at = bisect.bisect_left(with_room, (n, -1))
        if at == len(with_room):
            batches.append([index])
            room, batch = max_tokens - n, len(batches) - 1
        else:
            room, batch = with_room.pop(at)
            batches[batch].append(index)
            room -= n
        if room > 0 and len(batches[batch]) < max_samples:
            bisect.insort(with_room, (room, batch))
    return batches


def shard_batches(
    batches: list[list[int]], lengths: dict[int, int], num_shards: int, shard: int
) -> list[list[int]]:
    """The batches of one shard of `num_shards`: complete batches, dealt by their tokens.

    Largest first to the shard with the fewest tokens, so that shards differ by one batch at
    most. A batch is the same in whichever shard it runs, and so are its files.
    """
    tokens = [sum(lengths[i] for i in batch) for batch in batches]
    loads = [(0, n) for n in range(num_shards)]
    mine = []
    for n in sorted(range(len(batches)), key=lambda n: (-tokens[n], n)):
        load, least = heapq.heappop(loads)
        heapq.heappush(loads, (load + tokens[n], least))
        if least == shard:
            mine.append(n)
    return [batches[n] for n in sorted(mine)]
