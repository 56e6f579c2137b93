"""Samples packed end to end into one row, and which of its positions a training step needs.

All index work happens here, on the CPU, so that a step on a GPU never waits for it.

Shape suffixes: T tokens of the row, N query positions computed, U target states, n losses of one
depth, K depths, L captured layers (A = L - 1 aux ones), H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from common.draft.loss_table import loss_table, query_positions
from common.states.files import dequantize_rows

# Rows, query positions and losses are filled up to multiples of this. On a CPU, oneDNN compiles a
# kernel for every new shape of a bfloat16 product (about 10 ms each, as much as the product
# itself); on a GPU, kernels like round shapes.
FILL = 128


@dataclass(frozen=True)
class DepthLosses:
    """The predictions of one depth that carry loss: the first `real` of n, the rest is filling.

    at_n: places of their query positions in query_N; target_n: places of their targets in
    target_U; label_n: the data's token there, -1 where the sample has ended. All int64.
    """

    at_n: torch.Tensor
    target_n: torch.Tensor
    label_n: torch.Tensor
    real: int


@dataclass(frozen=True)
class PackedRow:
    """One packed row; nothing is shifted across the borders of its samples.

    states_TLH: as stored, the final layer (before the final norm) last; scale_TL: float32, of
    float8 states. ids_T, positions_T (from 0 in each sample), sample_T (its number): int64;
    lengths: tokens of each sample.
    query_N: the query positions to compute, ascending; counts: how many are of each sample;
    tokens_KN: the token that each takes at each depth, t+1+k.
    target_U: the tokens whose final state gives the target distribution of some prediction;
    losses: of the depths that have any.
    blocks: see block_lists.
    """

    states_TLH: torch.Tensor
    scale_TL: torch.Tensor | None
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    sample_T: torch.Tensor
    lengths: list[int]
    query_N: torch.Tensor
    counts: list[int]
    tokens_KN: torch.Tensor
    target_U: torch.Tensor
    losses: list[DepthLosses]
    blocks: list[torch.Tensor]

    def to(self, device: str) -> "PackedRow":
        """The row on a device; from page-locked memory nothing waits."""
        return self if device == "cpu" else moved(self, device)

    def aux(self, dtype: torch.dtype) -> torch.Tensor:
        """The aux layers' states side by side, [T, A*H]."""
        states_TAH = self.states_TLH[:, :-1]
        if self.scale_TL is not None:
            states_TAH = dequantize_rows(states_TAH, self.scale_TL[:, :-1], dtype)
        return states_TAH.to(dtype).flatten(1)

    def last(self, dtype: torch.dtype) -> torch.Tensor:
        """The final layer's states that the targets are made of, [U, H]."""
        states_UH = self.states_TLH[self.target_U, -1]
        if self.scale_TL is not None:
            states_UH = dequantize_rows(states_UH, self.scale_TL[self.target_U, -1], dtype)
        return states_UH.to(dtype)


def moved(value: Any, device: str) -> Any:
    """The value with all tensors in it, in lists and in these dataclasses, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list):
        return [moved(x, device) for x in value]
    if isinstance(value, PackedRow | DepthLosses):
        return replace(
            value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)}
        )
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a row."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list):
        for x in value:
            yield from tensors_of(x)
    elif isinstance(value, PackedRow | DepthLosses):
        for f in fields(value):
            yield from tensors_of(getattr(value, f.name))


def make_row(
    states_TLH: torch.Tensor,
    scale_TL: torch.Tensor | None,
    ids_T: torch.Tensor,
    mask_T: torch.Tensor,
    lengths: list[int],
    depths: int,
    rule: str,
) -> PackedRow:
    """Find a row's query positions, targets and losses.

    Args:
        mask_T: bool, the samples' loss masks.
        lengths: tokens of each sample; they sum to T.
        rule: see loss_table.
    """
    T, lengths_S = len(ids_T), torch.tensor(lengths)
    ends_S = lengths_S.cumsum(0)
    starts_S = ends_S - lengths_S
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
    positions_T = torch.arange(T) - starts_S[sample_T]
    table_KT = loss_table(mask_T, starts_S.tolist(), depths, rule)
    needed_N = query_positions(table_KT)
    query_N = filled(needed_N)
    target_U, losses = find_losses(table_KT, needed_N, ids_T, ends_S[sample_T])
    borders = torch.cat([starts_S, torch.tensor([T])])
    return PackedRow(
        states_TLH=states_TLH,
        scale_TL=scale_TL,
        ids_T=ids_T,
        positions_T=positions_T,
        sample_T=sample_T,
        lengths=lengths,
        query_N=query_N,
        counts=torch.searchsorted(query_N, borders).diff().tolist(),
        tokens_KN=torch.stack([ids_T[(query_N + 1 + k).clamp(max=T - 1)] for k in range(depths)]),
        target_U=filled(target_U),
        losses=losses,
        blocks=block_lists(query_N, positions_T[query_N], T),
    )


def find_losses(
    table_KT: torch.Tensor, query_N: torch.Tensor, ids_T: torch.Tensor, ends_T: torch.Tensor
) -> tuple[torch.Tensor, list[DepthLosses]]:
    """Return (target_U, losses) of a row, see PackedRow; ends_T: the end of each token's sample.

    Query position t at depth k predicts token t+2+k, whose target distribution is that of the
    verifier's final state of token t+1+k.
    """
    found = []
    for k, table_T in enumerate(table_KT):
        at_n = table_T[query_N].nonzero().view(-1)
        if len(at_n) == 0:
            break
        query_n = query_N[at_n]
        label_n = ids_T[(query_n + 2 + k).clamp(max=len(ids_T) - 1)]
        label_n = torch.where(query_n + 2 + k < ends_T[query_n], label_n, -1)
        found.append((at_n, query_n + 1 + k, label_n))
    target_U = torch.cat([tokens_n for _, tokens_n, _ in found]).unique()
    losses = []
    for at_n, tokens_n, label_n in found:
        target_n = torch.searchsorted(target_U, tokens_n)
        losses.append(DepthLosses(filled(at_n), filled(target_n), filled(label_n), len(at_n)))
    return target_U, losses


def filled_size(size: int) -> int:
    """The next multiple of FILL."""
    return size + -size % FILL


def filled(index_n: torch.Tensor) -> torch.Tensor:
    """The indices filled up to a multiple of FILL with their last."""
    return torch.cat([index_n, index_n[-1:].expand(-len(index_n) % FILL)])


def block_lists(query_N: torch.Tensor, positions_N: torch.Tensor, T: int) -> list[torch.Tensor]:
    """Which blocks of FILL query positions and FILL tokens attention has to look at: a query
    position sees the tokens of its sample up to its own.

    Returns:
        Flex attention's lists, counts [1, 1, rows] and indices [1, 1, rows, blocks] in turn,
        int32: of a block of query positions, the blocks of tokens seen in part, and seen in full;
        then of a block of tokens, the blocks of query positions that see it in part, and in full.
    """
    first_b = torch.arange(0, T, FILL)
    start_N1, last_N1 = (query_N - positions_N)[:, None], query_N[:, None]
    some_Nb = (start_N1 < first_b + FILL) & (last_N1 >= first_b)
    every_Nb = (start_N1 <= first_b) & (last_N1 >= first_b + FILL - 1)
    full_bb = every_Nb.view(-1, FILL, len(first_b)).all(1)
    part_bb = some_Nb.view(-1, FILL, len(first_b)).any(1) & ~full_bb
    lists = []
    for dense in (part_bb, full_bb, part_bb.T, full_bb.T):
        # in rows, which its kernels take for granted; argsort keeps a transposed layout
        indices = torch.argsort(dense.int().contiguous(), descending=True, stable=True)
        lists += [dense.sum(-1).int()[None, None], indices.int()[None, None]]
    return lists
