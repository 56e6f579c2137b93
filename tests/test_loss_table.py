"""The rule of loss positions, against its definition in words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.draft.loss_table import loss_table, query_positions

pytestmark = pytest.mark.quick

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


def starts_of(samples):
    out, at = [], 0
    for s in samples:
        out.append(at)
        at += len(s)
    return out


def plain(samples, depths, rule):
    """The table, a sample at a time, from the definition."""
    rows: list[list[bool]] = [[] for _ in range(depths)]
    for mask in samples:
        for k in range(depths):
            for t in range(len(mask)):
                if rule == "answer":
                    path = [t + 1 + i for i in range(k + 2)]
                    rows[k].append(all(p < len(mask) and mask[p] for p in path))
                else:
                    rows[k].append(t + 1 + k < len(mask) and mask[t + 1 + k])
    return torch.tensor(rows, dtype=torch.bool)


@given(masks, st.integers(1, 4), st.sampled_from(["answer", "next"]))
def test_table_is_the_definition(samples, depths, rule):
    flat = torch.tensor([m for s in samples for m in s], dtype=torch.bool)
    table = loss_table(flat, starts_of(samples), depths, rule)
    assert torch.equal(table, plain(samples, depths, rule))


@given(masks, st.integers(1, 4), st.sampled_from(["answer", "next"]))
def test_query_positions_are_those_with_loss_at_any_depth(samples, depths, rule):
    table = plain(samples, depths, rule)
    assert query_positions(table).tolist() == [
        t for t in range(table.shape[1]) if any(table[k, t] for k in range(depths))
    ]


def test_the_docstring_example():
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    table = loss_table(mask, [0], 3).int().tolist()
    assert table == [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
    ]
