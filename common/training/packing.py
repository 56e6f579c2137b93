"""Packed rows of samples: which samples train, and which go together."""

import hashlib
import random
from dataclasses import dataclass

import torch

from common.data.samples import Sample
from common.draft.loss_table import loss_table


def is_heldout(conversation: str, fraction: float) -> bool:
    """Whether a conversation is held out: by a hash of its id, so that growing the data or
    another seed never moves a conversation across the split."""
    digest = hashlib.sha256(conversation.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def carries_loss(sample: Sample, rule: str) -> bool:
    """Whether any prediction of the sample carries loss (M[0] of loss_table is not empty)."""
    return bool(loss_table(torch.from_numpy(sample.loss_mask), [0], 1, rule).any())


def split_samples(
    samples: dict[int, Sample], heldout_fraction: float, rule: str
) -> tuple[dict[int, int], dict[int, int]]:
    """(training samples, held-out samples), index → tokens each, of those that carry loss; held
    out by the rule "answer", which their measure follows.

    An answer of one token gives the draft nothing to predict.
    """
    train: dict[int, int] = {}
    held: dict[int, int] = {}
    for index, sample in samples.items():
        out = is_heldout(sample.conversation, heldout_fraction)
        if carries_loss(sample, "answer" if out else rule):
            (held if out else train)[index] = len(sample.input_ids)
    return train, held


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
class Step:
    """One optimizer step: its epoch, from 1; the samples of each of its rows; their tokens."""

    epoch: int
    rows: list[list[int]]
    tokens: int


def plan_steps(
    lengths: dict[int, int], budget: int, epochs: int, seed: int, rows_per_step: int
) -> list[Step]:
    """All steps of a run: every epoch packs all samples again, in an order of its own."""
    steps = []
    for epoch in range(epochs):
        rows = pack_rows(lengths, budget, seed * 100_003 + epoch)
        for at in range(0, len(rows), rows_per_step):
            group = rows[at : at + rows_per_step]
            steps.append(Step(epoch + 1, group, sum(lengths[i] for row in group for i in row)))
    return steps


def ends_epoch(steps: list[Step], number: int) -> bool:
    """Whether an epoch is complete after step `number`, from 1."""
    return number == len(steps) or steps[number].epoch != steps[number - 1].epoch


@dataclass(frozen=True)
class StepWork:
    """What samples ask of a step: query positions; predictions with loss at each depth."""

    queries: int
    losses: list[int]


def count_work(samples: list[Sample], depths: int, rule: str) -> StepWork:
    """Count a step's work from its samples' masks alone."""
    tables = [loss_table(torch.from_numpy(s.loss_mask), [0], depths, rule) for s in samples]
    queries = sum(int(table.any(0).sum()) for table in tables)
    return StepWork(queries, torch.stack([table.sum(1) for table in tables]).sum(0).tolist())
