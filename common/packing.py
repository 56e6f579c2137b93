"""Packed rows of samples: which go together, and how they are read from 03's files."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch

from common.eagle3 import PackedRow
from common.hidden_files import hidden_file, read_hidden
from common.loss_table import loss_table
from common.samples import Sample


def is_heldout(conversation: str, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its id, so that growing the data or
    another seed never moves a conversation across the split."""
    digest = hashlib.sha256(conversation.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


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


@dataclass(frozen=True)
class RowReader:
    """Reads packed rows from a hidden-states folder; called from a loader thread."""

    folder: Path
    samples: dict[int, Sample]
    depths: int
    rule: str

    def read(self, indices: list[int]) -> PackedRow:
        """Read samples into a row on the CPU; ValueError-free by the checks of 04."""
        hidden, starts, masks = [], [], []
        at = 0
        for index in indices:
            sample = self.samples[index]
            hidden_TLH, _ = read_hidden(hidden_file(self.folder, index))
            hidden.append(hidden_TLH)
            starts.append(at)
            masks.append(torch.tensor(sample.loss_mask, dtype=torch.bool))
            at += len(sample.input_ids)
        row_TLH = torch.cat(hidden)
        ids = [i for index in indices for i in self.samples[index].input_ids]
        positions = [torch.arange(len(m)) for m in masks]
        return PackedRow(
            aux_TAH=row_TLH[:, :-1].flatten(1),
            last_TH=row_TLH[:, -1],
            ids_T=torch.tensor(ids),
            positions_T=torch.cat(positions),
            starts=starts,
            table=loss_table(torch.cat(masks), starts, self.depths, self.rule),
        )
