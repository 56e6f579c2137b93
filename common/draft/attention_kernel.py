"""Own keys in TTT attention on a GPU: a query position's own keys of deeper TTT steps join the
softmax over its depth-0 keys. Needs triton, which comes with torch for GPUs.

With the base block's output o and log-sum-exp l, the scores s_j = scale q k_j, and
z = logsumexp(l, s_1, ..): out = exp(l - z) o + sum_j exp(s_j - z) v_j. A kernel each way reads
everything once.

Shape suffixes: J own keys, N query positions, h heads, g key/value heads, d head size.
"""

from typing import Any

import torch
import triton
import triton.language as tl

QUERIES = 8  # of a program


class OwnKeys(torch.autograd.Function):
    """See merge_own_keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q_Nhd: torch.Tensor,
        base_Nhd: torch.Tensor,
        lse_Nh: torch.Tensor,
        k_JNgd: torch.Tensor,
        v_JNgd: torch.Tensor,
    ) -> torch.Tensor:
        out_Nhd, total_Nh = torch.empty_like(q_Nhd), torch.empty_like(lse_Nh)
        inputs = q_Nhd, base_Nhd, lse_Nh, k_JNgd, v_JNgd
        grid, sizes = launch(q_Nhd, k_JNgd)
        own_keys_forward[grid](*inputs, out_Nhd, total_Nh, **sizes)
        ctx.save_for_backward(*inputs, out_Nhd, total_Nh)
        return out_Nhd

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in saved[:5]]
        grid, sizes = launch(saved[0], saved[3])
        own_keys_backward[grid](*saved, grads[0].contiguous(), *gradients, **sizes)
        return tuple(gradients)


def merge_own_keys(
    q_Nhd: torch.Tensor,
    base_Nhd: torch.Tensor,
    lse_Nh: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """Add the own keys to the base block's attention; [N, h, d] in the queries' dtype.

    Args:
        base_Nhd, lse_Nh: its output, and the log-sum-exp of its scaled scores, float32.
        keys, values: the query positions' own, [N, g, d] per depth.
    """
    own = torch.stack(keys), torch.stack(values)
    return OwnKeys.apply(q_Nhd.contiguous(), base_Nhd.contiguous(), lse_Nh.contiguous(), *own)


def launch(q_Nhd: torch.Tensor, k_JNgd: torch.Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """(grid, sizes) of either kernel: a program for a few query positions of one key/value head."""
    J, N, g, d = k_JNgd.shape
    times = q_Nhd.shape[1] // g
    sizes = {"N": N, "J": J, "G": g, "TIMES": times, "D": d, "SCALE": d**-0.5, "QUERIES": QUERIES}
    sizes |= {"R": triton.next_power_of_2(times), "E": triton.next_power_of_2(d)}
    return (triton.cdiv(N, QUERIES), g), sizes


@triton.jit
def places(N, G, TIMES, D, QUERIES: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """Of this program: offsets and masks in [N, h, d], [N, h] and [N, g, d]; offsets within one
    depth of the keys."""
    n = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    n, r, e = n[:, None, None], tl.arange(0, R)[None, :, None], tl.arange(0, E)[None, None, :]
    head = n * G * TIMES + tl.program_id(1) * TIMES + r
    inside_h = (n < N) & (r < TIMES)
    own = (n * G + tl.program_id(1)) * D + e
    return head * D + e, inside_h & (e < D), head, inside_h, own, (n < N) & (e < D)


@triton.jit
def own_keys_forward(
    q_ptr, base_ptr, lse_ptr, k_ptr, v_ptr, out_ptr, total_ptr,
    N, J: tl.constexpr, G: tl.constexpr, TIMES: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    at, inside, at_h, inside_h, own, inside_own = places(N, G, TIMES, D, QUERIES, R, E)
    q = tl.load(q_ptr + at, mask=inside, other=0).to(tl.float32)
    out = tl.load(base_ptr + at, mask=inside, other=0).to(tl.float32)
    total = tl.load(lse_ptr + at_h, mask=inside_h, other=0)
    depth = N.to(tl.int64) * G * D
    for j in tl.static_range(J):
        k = tl.load(k_ptr + j * depth + own, mask=inside_own, other=0).to(tl.float32)
        v = tl.load(v_ptr + j * depth + own, mask=inside_own, other=0).to(tl.float32)
        score = tl.sum(q * k, 2, keep_dims=True) * SCALE
        top = tl.maximum(total, score)
        grown = top + tl.log(tl.exp(total - top) + tl.exp(score - top))
        out = out * tl.exp(total - grown) + v * tl.exp(score - grown)
        total = grown
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(total_ptr + at_h, total, mask=inside_h)


@triton.jit
def own_keys_backward(
    q_ptr, base_ptr, lse_ptr, k_ptr, v_ptr, out_ptr, total_ptr, dout_ptr,
    dq_ptr, dbase_ptr, dlse_ptr, dk_ptr, dv_ptr,
    N, J: tl.constexpr, G: tl.constexpr, TIMES: tl.constexpr, D: tl.constexpr,
    SCALE: tl.constexpr, QUERIES: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    at, inside, at_h, inside_h, own, inside_own = places(N, G, TIMES, D, QUERIES, R, E)
    q = tl.load(q_ptr + at, mask=inside, other=0).to(tl.float32)
    base = tl.load(base_ptr + at, mask=inside, other=0).to(tl.float32)
    out = tl.load(out_ptr + at, mask=inside, other=0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=inside, other=0).to(tl.float32)
    total = tl.load(total_ptr + at_h, mask=inside_h, other=0)
    share = tl.exp(tl.load(lse_ptr + at_h, mask=inside_h, other=0) - total)
    mean = tl.sum(dout * out, 2, keep_dims=True)
    tl.store(dbase_ptr + at, (dout * share).to(dbase_ptr.dtype.element_ty), mask=inside)
    tl.store(dlse_ptr + at_h, share * (tl.sum(dout * base, 2, keep_dims=True) - mean), inside_h)
    dq = tl.zeros_like(q)
    depth = N.to(tl.int64) * G * D
    for j in tl.static_range(J):
        k = tl.load(k_ptr + j * depth + own, mask=inside_own, other=0).to(tl.float32)
        v = tl.load(v_ptr + j * depth + own, mask=inside_own, other=0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k, 2, keep_dims=True) * SCALE - total)
        dscore = weight * (tl.sum(dout * v, 2, keep_dims=True) - mean) * SCALE
        dq += dscore * k
        dk = tl.sum(dscore * q, 1, keep_dims=True)
        dv = tl.sum(weight * dout, 1, keep_dims=True)
        tl.store(dk_ptr + j * depth + own, dk.to(dk_ptr.dtype.element_ty), mask=inside_own)
        tl.store(dv_ptr + j * depth + own, dv.to(dv_ptr.dtype.element_ty), mask=inside_own)
    tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=inside)
