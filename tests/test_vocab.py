"""The vocabulary map: what is in, ties, fillers, and the two arrays' agreement."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.data.vocab_map import (
    build_map,
    choose_tokens,
    coverage_by_size,
    files_hash,
    load_map,
    merge_counts,
)
from common.errors import UserError
from common.manifest import Stage, write_manifest

pytestmark = pytest.mark.quick


@given(
    st.lists(st.integers(0, 5), min_size=4, max_size=60),
    st.sets(st.integers(0, 59)),
    st.integers(1, 60),
)
def test_map_holds_the_always_in_and_then_the_most_frequent(counts, special, size):
    counts = np.array(counts)
    always = np.zeros(len(counts), dtype=bool)
    always[[i for i in special if i < len(counts)]] = True
    size = max(1, min(size, len(counts)))
    if always.sum() > size:
        with pytest.raises(UserError, match="special tokens alone"):
            choose_tokens(counts, always, size)
        return
    chosen, filler = choose_tokens(counts, always, size)
    assert len(set(chosen)) == size
    assert set(np.flatnonzero(always)) <= set(chosen)
    rest = [i for i in chosen if not always[i]]
    out = [i for i in range(len(counts)) if i not in set(chosen)]
    assert all((counts[i], -i) > (counts[o], -o) for i in rest for o in out)
    assert filler == sum(counts[i] == 0 for i in rest)
    d2t, t2d = build_map(chosen, len(counts))
    assert d2t.dtype == np.int64
    assert np.array_equal(d2t + np.arange(size), np.flatnonzero(t2d))


def test_load_map_refuses_arrays_that_disagree(tmp_path):
    d2t, t2d = build_map(np.array([1, 4, 7]), 10)
    np.save(tmp_path / "d2t.npy", d2t)
    np.save(tmp_path / "t2d.npy", t2d)
    digest = files_hash(tmp_path / name for name in ("d2t.npy", "t2d.npy"))
    write_manifest(tmp_path, Stage("vocab", {}, {}), {}, digest, 0)
    assert np.array_equal(load_map(tmp_path, 10)[0], d2t)
    other = build_map(np.array([1, 4, 8]), 10)
    for name, array in zip(("d2t", "t2d"), other, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    with pytest.raises(UserError, match="its map is not the one that its manifest describes"):
        load_map(tmp_path, 10)
    np.save(tmp_path / "d2t.npy", np.array([1, 4, 7]))  # ids instead of offsets
    with pytest.raises(UserError, match="are not a map of the verifier's 10 tokens"):
        load_map(tmp_path, 10)


def test_sets_merge_by_their_share_whatever_their_size():
    small, large = np.array([3, 1, 0, 0]), np.array([0, 0, 600, 400])
    assert merge_counts([small, large], None).tolist() == [3, 1, 600, 400]
    merged = merge_counts([small, large], [3, 1])
    assert (merged / merged.sum()).round(6).tolist() == [0.5625, 0.1875, 0.15, 0.1]
    assert merge_counts([np.array([1, 10**9]), large[:2] + 1], [1, 10**6])[0] > 0


def test_coverage_counts_the_most_frequent():
    covered = coverage_by_size(np.array([1, 5, 0, 4]))
    assert [covered(n) for n in (1, 2, 3, 4, 99)] == [0.5, 0.9, 1, 1, 1]
