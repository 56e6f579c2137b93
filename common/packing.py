"""Packed rows of samples: which go together, and how they are read from 03's files."""

import hashlib
import random
from dataclasses import dataclass

import torch

from common.cli import UserError
from common.eagle3 import PackedRow
from common.hidden_files import read_hidden
from common.hidden_folder import HiddenFolder
from common.loss_table import loss_table, needed_columns
from common.samples import Sample


def is_heldout(conversation: str, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its id, so that growing the data or
    another seed never moves a conversation across the split."""
    digest = hashlib.sha256(conversation.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def carries_loss(sample: Sample, rule: str) -> bool:
    """Whether any prediction of the sample carries loss (M[0] of loss_table is not empty)."""
    mask_T = sample.loss_mask
    return bool((mask_T[1:-1] & mask_T[2:]).any() if rule == "answer" else mask_T[1:].any())


def pack_rows(lengths: dict[int, int], budget: int, shuffle: int | None) -> list[list[int]]:
    """Group samples into rows of at most `budget` tokens.

    Args:
        lengths: sample index → tokens, each at most `budget`.
        shuffle: seed of the order, a function of (seed, epoch); None keeps it.

    First fit over the last few open rows: keeps the order random and the rows full.
    """
    order = list(lengths)
    if shuffle is not None:
        random.Random(shuffle).shuffle(order)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        n = lengths[index]
        for at in range(max(0, len(rows) - 8), len(rows)):
            if room[at] >= n:
                rows[at].append(index)
                room[at] -= n
                break
        else:
            rows.append([index])
            room.append(budget - n)
    return rows


# On a CPU, oneDNN compiles a kernel for every new shape of a bfloat16 product (about 10 ms
# each, as much as the product itself). There, rows are filled up to one length and columns to
# a multiple of this, so that shapes repeat.
FILL = 128


@dataclass(frozen=True)
class RowReader:
    """Reads packed rows from a hidden-states folder; called from a loader thread.

    `fill_to`: the budget, whose next multiple of FILL rows are filled up to (0: not).
    """

    hidden: HiddenFolder
    samples: dict[int, Sample]
    depths: int
    rule: str
    fill_to: int = 0

    def read(self, indices: list[int]) -> PackedRow:
        """Read samples into a row on the CPU."""
        files = [self.hidden.file(i) for i in indices]
        hidden, stored = map(list, zip(*(read_hidden(f) for f in files), strict=True))
        ids = [torch.from_numpy(self.samples[i].input_ids).long() for i in indices]
        for path, mine, theirs in zip(files, ids, stored, strict=True):
            if not torch.equal(mine, theirs):
                raise UserError(f"{path}: its token_ids are not the sample's; delete it, run 03")
        masks = [torch.from_numpy(self.samples[i].loss_mask) for i in indices]
        if self.fill_to:
            n = -(-self.fill_to // FILL) * FILL + FILL - sum(len(x) for x in ids)
            hidden.append(hidden[0].new_zeros(n, *hidden[0].shape[1:]))
            ids.append(torch.zeros(n, dtype=torch.int64))
            masks.append(torch.zeros(n, dtype=torch.bool))
        starts = [0]
        for x in ids[:-1]:
            starts.append(starts[-1] + len(x))
        row_TLH = torch.cat(hidden)
        table = loss_table(torch.cat(masks), starts, self.depths, self.rule)
        columns = needed_columns(table)
        if self.fill_to:
            # every depth runs the same columns, some of the filling's among them
            extra = -len(columns[0]) % FILL
            columns = [torch.cat([columns[0], starts[-1] + torch.arange(extra)])] * self.depths
        return PackedRow(
            aux_TAH=row_TLH[:, :-1].flatten(1),
            last_TH=row_TLH[:, -1],
            ids_T=torch.cat(ids),
            positions_T=torch.cat([torch.arange(len(x)) for x in ids]),
            starts=starts,
            table=table,
            columns=columns,
        )
