"""Plans of forward passes and packed rows: nothing lost, nothing over budget, no chance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.extraction.batching import MAX_SAMPLES_PER_BATCH, make_batches
from common.training.packing import is_heldout, pack_rows

pytestmark = pytest.mark.quick

lengths = st.dictionaries(st.integers(0, 5000), st.integers(1, 64), min_size=1, max_size=300)


@given(lengths, st.integers(64, 200), st.integers(1, 400))
def test_units_hold_every_sample_once_within_both_limits(lengths, budget, most):
    units = make_batches(lengths, budget, most)
    assert sorted(i for u in units for i in u) == sorted(lengths)
    assert all(sum(lengths[i] for i in u) <= budget for u in units)
    assert all(len(u) <= min(most, MAX_SAMPLES_PER_BATCH) for u in units)


@given(lengths, st.integers(64, 200))
def test_units_depend_on_the_data_alone(lengths, budget):
    shuffled = dict(sorted(lengths.items(), key=lambda x: (x[1] * 7919 % 101, x[0])))
    assert make_batches(lengths, budget) == make_batches(shuffled, budget)


@given(lengths)
def test_units_are_full(lengths):
    """No two units could have been one, where the number of samples allows."""
    units = make_batches(lengths, 128)
    sums = sorted(sum(lengths[i] for i in u) for u in units if len(u) < MAX_SAMPLES_PER_BATCH)
    assert len(sums) < 2 or sums[0] + sums[1] > 128


def test_a_sample_over_the_budget_is_refused():
    with pytest.raises(ValueError, match="sample 3 has 70 tokens"):
        make_batches({3: 70}, 64)


@given(lengths, st.integers(64, 200), st.integers(0, 9))
def test_rows_hold_every_sample_once_and_repeat_for_a_seed(lengths, budget, seed):
    rows = pack_rows(lengths, budget, seed)
    assert sorted(i for r in rows for i in r) == sorted(lengths)
    assert all(sum(lengths[i] for i in r) <= budget for r in rows)
    assert rows == pack_rows(lengths, budget, seed)


def test_heldout_split_is_by_conversation_and_stable():
    names = [f"c{i}" for i in range(4000)]
    held = {n for n in names if is_heldout(n, 0.05)}
    assert 120 < len(held) < 280
    assert held <= {n for n in names if is_heldout(n, 0.1)}
