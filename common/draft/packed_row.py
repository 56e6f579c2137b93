"""Samples packed end to end into one row, and which of its places a training step needs.

All index work happens here, on the CPU, so that a step on a GPU never waits for it.

Shape suffixes: T tokens of the row, N columns computed, U teacher rows, n losses of one depth,
K depths, L captured layers (A = L - 1 aux ones), H hidden size.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from common.draft.loss_table import loss_table, needed_columns
from common.states.files import dequantize_rows

# Rows, columns and losses are filled up to multiples of this. On a CPU, oneDNN compiles a
# kernel for every new shape of a bfloat16 product (about 10 ms each, as much as the product
# itself); on a GPU, kernels like round shapes.
FILL = 128


@dataclass(frozen=True)
class DepthLosses:
    """The predictions of one depth that carry loss: the first `real` of n, the rest is filling.

    at_n: places of their columns in columns_N; teacher_n: places of their targets in teacher_U;
    wanted_n: the data's token there, -1 where the sample has ended. All int64.
    """

    at_n: torch.Tensor
    teacher_n: torch.Tensor
    wanted_n: torch.Tensor
    real: int


@dataclass(frozen=True)
class PackedRow:
    """One packed row; nothing is shifted across the borders of its samples.

    states_TLH: as stored, the final layer (before the final norm) last; scale_TL: float32, of
    float8 states. ids_T, positions_T (from 0 in each sample), sample_T (its number): int64;
    lengths: tokens of each sample.
    columns_N: the columns to compute, ascending; counts: how many are of each sample;
    tokens_KN: the token that each takes at each depth, t+1+k.
    teacher_U: the tokens whose final state is the target of some prediction; losses: of the
    depths that have any.
    blocks: see block_lists.
    """

    states_TLH: torch.Tensor
    scale_TL: torch.Tensor | None
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    sample_T: torch.Tensor
    lengths: list[int]
    columns_N: torch.Tensor
    counts: list[int]
    tokens_KN: torch.Tensor
    teacher_U: torch.Tensor
    losses: list[DepthLosses]
    blocks: list[torch.Tensor]

    def to(self, device: str) -> "PackedRow":
        """The row on a device."""
        if device == "cpu":
            return self
        losses = [moved(x, device) for x in self.losses]
        blocks = [x.to(device, non_blocking=True) for x in self.blocks]
        return replace(moved(self, device), losses=losses, blocks=blocks)

    def tensors(self) -> list[torch.Tensor]:
        """All of its tensors."""
        parts: list[PackedRow | DepthLosses] = [self, *self.losses]
        return [x for part in parts for x in tensor_fields(part).values()] + self.blocks

    def aux(self, dtype: torch.dtype) -> torch.Tensor:
        """The aux layers' states side by side, [T, A*H]."""
        states_TAH = self.states_TLH[:, :-1]
        if self.scale_TL is not None:
            states_TAH = dequantize_rows(states_TAH, self.scale_TL[:, :-1], dtype)
        return states_TAH.to(dtype).flatten(1)

    def last(self, dtype: torch.dtype) -> torch.Tensor:
        """The final layer's states of the teacher's tokens, [U, H]."""
        states_UH = self.states_TLH[self.teacher_U, -1]
        if self.scale_TL is not None:
            states_UH = dequantize_rows(states_UH, self.scale_TL[self.teacher_U, -1], dtype)
        return states_UH.to(dtype)


Moved = TypeVar("Moved", PackedRow, DepthLosses)


def moved(one: Moved, device: str) -> Moved:
    """A copy whose tensors are on the device; from page-locked memory nothing waits."""
    there: dict[str, Any] = {
        k: v.to(device, non_blocking=True) for k, v in tensor_fields(one).items()
    }
    return replace(one, **there)


def tensor_fields(one: PackedRow | DepthLosses) -> dict[str, torch.Tensor]:
    """Its tensors by name, those of a row's losses left out."""
    found = {f.name: getattr(one, f.name) for f in fields(one)}
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


def make_row(
    states_TLH: torch.Tensor,
    scale_TL: torch.Tensor | None,
    ids_T: torch.Tensor,
    mask_T: torch.Tensor,
    lengths: list[int],
    depths: int,
    rule: str,
) -> PackedRow:
    """Find a row's columns, targets and losses.

    Args:
        mask_T: bool, the samples' loss masks.
        lengths: tokens of each sample; they sum to T.
        rule: see loss_table.
    """
    T = len(ids_T)
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    table_KT = loss_table(mask_T, starts, depths, rule)
    needed_N = needed_columns(table_KT)
    columns_N = filled(needed_N)
    # column t is depth k's prediction of token t+2+k from the teacher's state t+1+k
    losses, used_T = [], torch.zeros(T, dtype=torch.bool)
    targets = []
    ends_T = torch.repeat_interleave(
        torch.tensor(starts) + torch.tensor(lengths), torch.tensor(lengths)
    )
    for k in range(depths):
        at_n = table_KT[k][needed_N].nonzero().view(-1)
        if len(at_n) == 0:
            break
        column_n = needed_N[at_n]
        used_T[column_n + 1 + k] = True
        wanted_n = ids_T[(column_n + 2 + k).clamp(max=T - 1)]
        wanted_n = torch.where(column_n + 2 + k < ends_T[column_n], wanted_n, -1)
        targets.append((at_n, column_n + 1 + k, wanted_n))
    teacher_U = used_T.nonzero().view(-1)
    for at_n, target_n, wanted_n in targets:
        teacher_n = torch.searchsorted(teacher_U, target_n)
        losses.append(DepthLosses(filled(at_n), filled(teacher_n), filled(wanted_n), len(at_n)))
    borders, positions_T = torch.tensor([*starts, T]), torch.cat([torch.arange(n) for n in lengths])
    return PackedRow(
        states_TLH=states_TLH,
        scale_TL=scale_TL,
        ids_T=ids_T,
        positions_T=positions_T,
        sample_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        lengths=lengths,
        columns_N=columns_N,
        counts=torch.searchsorted(columns_N, borders).diff().tolist(),
        tokens_KN=torch.stack([ids_T[(columns_N + 1 + k).clamp(max=T - 1)] for k in range(depths)]),
        teacher_U=filled(teacher_U),
        losses=losses,
        blocks=block_lists(columns_N, positions_T[columns_N], T),
    )


def filled(index_n: torch.Tensor) -> torch.Tensor:
    """The indices filled up to a multiple of FILL with their last."""
    return torch.cat([index_n, index_n[-1:].expand(-len(index_n) % FILL)])


def block_lists(columns_N: torch.Tensor, positions_N: torch.Tensor, T: int) -> list[torch.Tensor]:
    """Which blocks of FILL columns and FILL tokens attention has to look at: a column sees the
    tokens of its sample up to its own.

    Returns:
        Flex attention's lists, counts [1, 1, rows] and indices [1, 1, rows, blocks] in turn,
        int32: of a block of columns, the blocks of tokens seen in part, and seen whole; then of a
        block of tokens, the blocks of columns that see it in part, and whole.
    """
    first_b = torch.arange(0, T, FILL)
    start_N1, last_N1 = (columns_N - positions_N)[:, None], columns_N[:, None]
    some_Nb = (start_N1 < first_b + FILL) & (last_N1 >= first_b)
    every_Nb = (start_N1 <= first_b) & (last_N1 >= first_b + FILL - 1)
    whole_bb = every_Nb.view(-1, FILL, len(first_b)).all(1)
    part_bb = some_Nb.view(-1, FILL, len(first_b)).any(1) & ~whole_bb
    lists = []
    for dense in (part_bb, whole_bb, part_bb.T, whole_bb.T):
        # in rows, which its kernels take for granted; argsort keeps a transposed layout
        indices = torch.argsort(dense.int().contiguous(), descending=True, stable=True)
        lists += [dense.sum(-1).int()[None, None], indices.int()[None, None]]
    return lists
