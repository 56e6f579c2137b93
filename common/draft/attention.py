"""Attention of training-time test: causal over depth-0 keys, plus a position's own deeper keys.

Query position t at depth j sees the depth-0 keys s <= t of its sample and its own keys of depths
1..j; no other position's deeper keys (EAGLE-3's mask: a causal base block, then diagonal ones):

    depth-0 keys   depth-1   depth-2
    1 0 0          1 0 0     1 0 0
    1 1 0          0 1 0     0 1 0
    1 1 1          0 0 1     0 0 1

The base block is ordinary attention; each deeper depth adds one score per query position, of its
own key. The two merge by their log-sum-exps.

Shape suffixes: T tokens of a row, N query positions, J own keys of each, h heads, g key/value
heads, r = h/g, d head size, c = d/2; of one sample: n query positions, s tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from common.draft.compiled import region
from common.draft.packed_row import FILL, PackedRow


def rope_table(positions_N: torch.Tensor, d: int, theta: float) -> torch.Tensor:
    """Cosines and sines of the positions' rotary angles, float32 [N, 2, d / 2]."""
    exponent = torch.arange(d // 2, dtype=torch.float32, device=positions_N.device) / (d // 2)
    angle_Nc = positions_N.float()[:, None] * theta**-exponent
    return torch.stack([angle_Nc.cos(), angle_Nc.sin()], 1)


@region
def rotate(x_Nhd: torch.Tensor, rope_N2d: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves convention (Llama), computed in float32; see rope_table. The shape
    [N, h or g, d] stays."""
    half = x_Nhd.shape[-1] // 2
    cos, sin = rope_N2d[:, None, 0], rope_N2d[:, None, 1]
    a, b = x_Nhd[..., :half].float(), x_Nhd[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_Nhd.dtype)


class TTTAttention:
    """Attention of one row's query positions, at one depth after another.

    On a GPU by flex attention, whose block mask is made once per row; on a CPU, where flex
    attention has no gradient, sample by sample, long ones in blocks.

    Args:
        k_Tgd, v_Tgd: rotated depth-0 keys and the values of all tokens.
    """

    def __init__(self, row: PackedRow, k_Tgd: torch.Tensor, v_Tgd: torch.Tensor):
        self.row, self.k_Tgd, self.v_Tgd = row, k_Tgd, v_Tgd
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.mask = block_mask(row) if k_Tgd.is_cuda else None

    def add_own(self, k_Ngd: torch.Tensor, v_Ngd: torch.Tensor) -> None:
        """The query positions' keys and values of the next depth."""
        self.own.append((k_Ngd, v_Ngd))

    def __call__(self, q_Nhd: torch.Tensor) -> torch.Tensor:
        """Rotated queries → mixed values, [N, h, d], in the queries' dtype."""
        if self.mask is None:
            return attend_by_sample(q_Nhd, self.k_Tgd, self.v_Tgd, self.own, self.row)
        from torch.nn.attention.flex_attention import AuxRequest

        q_1hNd, k_1gTd, v_1gTd = (x.transpose(0, 1)[None] for x in (q_Nhd, self.k_Tgd, self.v_Tgd))
        for tensor, sizes in (q_1hNd, [0, 1, 3]), (k_1gTd, [0, 1, 2, 3]), (v_1gTd, [0, 1, 2, 3]):
            torch._dynamo.mark_static(tensor, sizes)
        out_1hNd, aux = flex()(
            q_1hNd,
            k_1gTd,
            v_1gTd,
            block_mask=self.mask,
            enable_gqa=q_Nhd.shape[1] != self.k_Tgd.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        out_Nhd, lse_Nh = out_1hNd[0].transpose(0, 1), aux.lse[0].T
        if not self.own:
            return out_Nhd
        from common.draft.attention_kernel import merge_own_keys

        keys, values = zip(*self.own, strict=True)
        return merge_own_keys(q_Nhd, out_Nhd, lse_Nh, list(keys), list(values))


# ---------------------------------------------------------------- on a GPU


@functools.cache
def flex() -> Any:
    """flex_attention, compiled; the uncompiled one holds every score in memory."""
    from torch.nn.attention.flex_attention import flex_attention

    # Rows differ in their query positions: a variable from the first one on; see mark_static above.
    return torch.compile(flex_attention, fullgraph=True, dynamic=True)


def block_mask(row: PackedRow) -> Any:
    """Flex attention's mask: tokens up to the query position, of its sample."""
    from torch.nn.attention.flex_attention import BlockMask

    query_N, sample_T = row.query_N, row.sample_T
    sample_N = sample_T[query_N]

    def seen(_batch: Any, _head: Any, n: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (sample_N[n] == sample_T[t]) & (t <= query_N[n])

    sizes = len(query_N), len(sample_T)
    return BlockMask(sizes, *row.blocks, (FILL, FILL), seen)  # type: ignore[arg-type, call-arg]


def merge_own_keys_plain(
    q_Nhd: torch.Tensor,
    base_Nhd: torch.Tensor,
    lse_Nh: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """attention_kernel.merge_own_keys by torch's operations, which torch.compile fuses."""
    return merge_region(q_Nhd, base_Nhd, lse_Nh, torch.stack(keys, 1), torch.stack(values, 1))


@region
def merge_region(
    q_Nhd: torch.Tensor,
    base_Nhd: torch.Tensor,
    lse_Nh: torch.Tensor,
    k_NJgd: torch.Tensor,
    v_NJgd: torch.Tensor,
) -> torch.Tensor:
    """The softmax of the base block's scores and of J own keys' together, [N, h, d]."""
    h, (g, d) = q_Nhd.shape[1], k_NJgd.shape[2:]
    q_N1grd = q_Nhd.float().unflatten(1, (g, h // g))[:, None]
    score_NJh = (q_N1grd * k_NJgd[:, :, :, None].float()).sum(-1).flatten(2) * d**-0.5
    total_Nh = torch.cat([lse_Nh[:, None], score_NJh], 1).logsumexp(1)
    p_NJgr = (score_NJh - total_Nh[:, None]).exp().unflatten(2, (g, h // g))
    own_Nhd = (p_NJgr[..., None] * v_NJgd[:, :, :, None].float()).sum(1).flatten(1, 2)
    base_share_Nh = (lse_Nh - total_Nh).exp()
    return (base_Nhd.float() * base_share_Nh[..., None] + own_Nhd).to(q_Nhd.dtype)


# ---------------------------------------------------------------- on a CPU

# Scores per head of a block: a sample of up to 1024 tokens is one, and keeps them for its backward
# pass; a longer one's are computed a block at a time, and again in the backward pass.
BLOCK_SCORES = 2**20


def block_queries(tokens: int) -> int:
    """Query positions of a block of a sample of so many tokens."""
    return max(1, BLOCK_SCORES // tokens)


def attend_by_sample(
    q_Nhd: torch.Tensor,
    k_Tgd: torch.Tensor,
    v_Tgd: torch.Tensor,
    own: list[tuple[torch.Tensor, torch.Tensor]],
    row: PackedRow,
) -> torch.Tensor:
    """One depth's attention output [N, h, d], one sample at a time; `own` holds the query
    positions' keys and values [N, g, d] of the depths from 1 on."""
    # split, not slices: its gradient is one concatenation
    k_samples, v_samples = k_Tgd.split(row.lengths), v_Tgd.split(row.lengths)
    own_samples = [x.split(row.counts) for pair in own for x in pair]
    q_samples = q_Nhd.split(row.counts)
    place_samples = row.positions_T[row.query_N].split(row.counts)
    parts = []
    for n, (q_nhd, place_n) in enumerate(zip(q_samples, place_samples, strict=True)):
        if len(q_nhd) == 0:
            continue
        inputs = q_nhd, k_samples[n], v_samples[n], *(x[n] for x in own_samples)
        size = block_queries(row.lengths[n])
        if len(q_nhd) <= size:
            parts.append(attend(place_n, *inputs))
        else:
            parts.append(AttendInBlocks.apply(size, place_n, *inputs))
    return torch.cat(parts)


def attend(
    place_n: torch.Tensor,
    q_nhd: torch.Tensor,
    k_sgd: torch.Tensor,
    v_sgd: torch.Tensor,
    *own_ngd: torch.Tensor,
) -> torch.Tensor:
    """Attention output [n, h, d] of one sample's query positions, at these places in it, by plain
    products and a softmax; own_ngd: their own keys and values of each depth in turn."""
    times, scale = q_nhd.shape[1] // k_sgd.shape[1], q_nhd.shape[-1] ** -0.5

    def heads(x: torch.Tensor) -> torch.Tensor:
        """[., g, d] → float32 [h, ., d]. oneDNN compiles a kernel for every new shape of a
        bfloat16 product, which costs more than these small products; float32 needs none."""
        x = x.float().repeat_interleave(times, 1) if times > 1 else x.float()
        return x.transpose(0, 1)

    q_hnd, k_hsd, v_hsd = q_nhd.float().transpose(0, 1), heads(k_sgd), heads(v_sgd)
    score_hns = q_hnd @ k_hsd.transpose(1, 2)
    later_ns = torch.arange(len(k_sgd), device=q_nhd.device) > place_n[:, None]
    score_hns = score_hns.masked_fill(later_ns, float("-inf"))
    own_scores = [(q_hnd * heads(k)).sum(-1)[..., None] for k in own_ngd[::2]]
    p_hns = torch.softmax(torch.cat([score_hns, *own_scores], -1) * scale, -1)
    out_hnd = p_hns[..., : len(k_sgd)] @ v_hsd
    for j, v in enumerate(own_ngd[1::2]):
        out_hnd = out_hnd + p_hns[..., len(k_sgd) + j, None] * heads(v)
    return out_hnd.transpose(0, 1).to(q_nhd.dtype)


class AttendInBlocks(torch.autograd.Function):
    """`attend` by blocks of query positions, each over the tokens up to its last one; the backward
    pass computes a block's scores again, so that those of no two blocks are there at once."""

    @staticmethod
    def forward(ctx: Any, size: int, place_n: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.size = size
        ctx.save_for_backward(place_n, *inputs)
        blocks = blocks_of(size, place_n, inputs)
        return torch.cat([attend(place_n[at], *block) for at, block in blocks])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        place_n, *inputs = ctx.saved_tensors
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in inputs]
        blocks, totals = (blocks_of(ctx.size, place_n, x) for x in (inputs, sums))
        for (at, block), (_, total) in zip(blocks, totals, strict=True):
            float_block = [x.detach().float().requires_grad_() for x in block]
            with torch.enable_grad():
                out_nhd = attend(place_n[at], *float_block)
            found = torch.autograd.grad(out_nhd, float_block, grads[0][at].float())
            for one, gradient in zip(total, found, strict=True):
                one += gradient
        return None, None, *(x.to(y.dtype) for x, y in zip(sums, inputs, strict=True))


def blocks_of(
    size: int, place_n: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """For each `size` query positions: where they are in n, and what `attend` takes of `tensors`
    (queries, keys, values, own ones) for them."""
    q_nhd, k_sgd, v_sgd, *own_ngd = tensors
    for start in range(0, len(place_n), size):
        at = slice(start, start + size)
        seen = slice(int(place_n[at][-1]) + 1)
        yield at, [q_nhd[at], k_sgd[seen], v_sgd[seen], *(x[at] for x in own_ngd)]
