"""TTT attention on a CPU, in one block and in several, against the mask written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.draft import attention
from common.draft.attention import TTTAttention
from common.draft.packed_row import PackedRow, make_row

pytestmark = pytest.mark.quick

HEADS, KV_HEADS, SIZE = 4, 2, 6


def random_row(lengths: list[int], depths: int, loss_share: float) -> PackedRow:
    T = sum(lengths)
    mask = torch.rand(T) < loss_share
    mask[:3] = True  # something carries loss
    ids = torch.zeros(T, dtype=torch.long)
    return make_row(torch.zeros(T, 4, 1), None, ids, mask, lengths, depths, "answer")


def inputs_of(row: PackedRow, depths: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Depth-0 keys and values, each depth's queries, each deeper depth's own keys and values."""
    T, N = len(row.ids_T), len(row.query_N)
    shapes = [(T, KV_HEADS)] * 2 + [(N, HEADS)] * depths + [(N, KV_HEADS)] * 2 * (depths - 1)
    return [torch.randn(*s, SIZE).to(dtype).requires_grad_() for s in shapes]


def by_depth(row: PackedRow, inputs: list[torch.Tensor], depths: int) -> list[torch.Tensor]:
    k, v, *rest = inputs
    queries, own = rest[:depths], rest[depths:]
    attend = TTTAttention(row, k, v)
    outs = []
    for j, q in enumerate(queries):
        if j:
            attend.add_own(*own[2 * j - 2 : 2 * j])
        outs.append(attend(q))
    return outs


def written_out(row: PackedRow, inputs: list[torch.Tensor], depths: int) -> list[torch.Tensor]:
    """The same by one softmax over all tokens and own keys, masked."""
    k, v, *rest = [x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in inputs]
    queries, own = rest[:depths], rest[depths:]
    N, T = len(row.query_N), len(row.ids_T)
    query_N1 = row.query_N[:, None]
    seen_NT = (row.sample_T[query_N1] == row.sample_T) & (torch.arange(T) <= query_N1)
    outs = []
    for j, q in enumerate(queries):
        keys, values = torch.cat([k, *own[: 2 * j : 2]], 1), torch.cat([v, *own[1 : 2 * j : 2]], 1)
        seen = torch.cat([seen_NT, *[torch.eye(N, dtype=torch.bool)] * j], 1)
        scores = (q @ keys.transpose(1, 2) * SIZE**-0.5).masked_fill(~seen, float("-inf"))
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return outs


def with_gradients(
    outs: list[torch.Tensor], inputs: list[torch.Tensor], seed: int
) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    total = sum((x.double() * torch.randn(x.shape, generator=g)).sum() for x in outs)
    assert isinstance(total, torch.Tensor)
    return [*(x.detach() for x in outs), *torch.autograd.grad(total, inputs)]


@given(
    st.lists(st.integers(4, 24), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 600),
    st.floats(0.1, 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 100),
)
@settings(max_examples=20)
def test_blocks_of_any_size_give_the_whole(lengths, depths, scores, share, dtype, seed):
    """Outputs and all gradients, of blocks of one query position to all of them."""
    torch.manual_seed(seed)
    row = random_row(lengths, depths, share)
    inputs = inputs_of(row, depths, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_SCORES", scores)
        found = with_gradients(by_depth(row, inputs, depths), inputs, seed)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = with_gradients(written_out(row, exact, depths), exact, seed)
    close = 1e-5 if dtype == torch.float32 else 0.02
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm()) < close * (1 + float(theirs.norm()))


def test_what_is_kept_grows_with_the_length():
    """Of a sample of several blocks nothing of the size of its scores waits for the gradients."""
    kept = []
    for length in (1100, 2200):
        row = random_row([length], 2, 1.0)
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            outs = by_depth(row, inputs_of(row, 2, torch.bfloat16), 2)
        assert outs[0].isfinite().all()
        kept.append(sum(sizes.values()))
    assert kept[1] < 2.2 * kept[0]
