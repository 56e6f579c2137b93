"""Memory that a training step takes on a CPU beside weights, gradients and optimizer state.

Counted from what model.py, attention.py, linear_products.py and losses.py keep for the backward
pass; a norm's float32 input and output are 8 bytes per element.
"""

from dataclasses import dataclass

from common.draft.attention import BLOCK_SCORES, block_queries
from common.draft.config import DraftShape

# Matrices as large as a block's scores that are there at once: forward; with the gradients.
FORWARD, BACKWARD = 3, 4


@dataclass(frozen=True)
class RowSize:
    """A packed row: tokens, with what it is filled up with; of each sample, its query positions
    and its tokens."""

    tokens: int
    samples: list[tuple[int, int]]

    @property
    def queries(self) -> int:
        return sum(n for n, _ in self.samples)


@dataclass(frozen=True)
class Activations:
    """Bytes: attention's, and all others' at their largest."""

    attention: int
    others: int

    @property
    def total(self) -> int:
        return self.attention + self.others


def activations(
    shape: DraftShape, itemsize: int, row: RowSize, depths: int, train_lm_head: bool
) -> Activations:
    """Of one row, forward and backward; `itemsize` is the compute dtype's."""
    attention = attention_memory(shape, itemsize, row, depths)
    return Activations(attention, other_memory(shape, itemsize, row, depths, train_lm_head))


def attention_memory(shape: DraftShape, itemsize: int, row: RowSize, depths: int) -> int:
    """Queries, keys and values of all depths, the scores that samples of one block keep, and the
    largest block's."""
    h, d = shape.num_attention_heads, shape.head_dim
    queries = row.queries * (shape.query_size + 2 * shape.key_size)
    kept = itemsize * (depths * queries + 3 * row.tokens * shape.key_size)
    copies = itemsize < 4 or h > shape.num_key_value_heads  # float32, one for each head
    largest = 0
    for n, tokens in row.samples:
        if n == 0:
            continue
        size = block_queries(tokens)
        inputs = 4 * h * d * (n * depths + 2 * tokens)  # of the last depth, in float32
        if n <= size:
            kept += depths * (4 * h + 1) * n * tokens + depths * inputs * copies
            largest = max(largest, FORWARD * 4 * h * n * tokens)
        else:  # the keys' and values' copies, gradients and sums
            largest = max(largest, BACKWARD * 4 * h * BLOCK_SCORES + 3 * inputs)
    return kept + largest


def other_memory(
    shape: DraftShape, itemsize: int, row: RowSize, depths: int, train_lm_head: bool
) -> int:
    """The larger of what is there when the backward pass starts, and when it has ended: then the
    inputs and gradients of all products wait for the weights' gradients."""
    s, b, N, K = shape, itemsize, row.queries, depths
    H, inner, head = s.hidden_size, s.intermediate_size, s.draft_vocab_size * train_lm_head
    aux = s.num_aux_layers * H
    tokens = aux * (b + 4 * (s.norm_before_fc or s.fc_norm)) + H * (12 + 3 * b)
    layer = H * (20 + 6 * b) + 4 * inner * b
    losses = H * (8 + 3 * b) + head * b
    before = row.tokens * tokens + K * N * (layer + losses)
    # the targets and a frozen head's logits; or the gradients of the last depth's SwiGLU
    before += N * b * max(s.draft_vocab_size * (1 if train_lm_head else 2), 3 * inner)

    inputs = row.tokens * (aux + 2 * H) + K * N * (4 * H + s.query_size + inner)
    gradients = row.tokens * (H + 2 * s.key_size)
    gradients += K * N * (2 * H + 2 * inner + s.query_size + 2 * s.key_size + head)
    side_by_side = K * N * (H + max(inner, head))
    after = b * (inputs + gradients + side_by_side)
    return max(before, after)
