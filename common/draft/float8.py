"""Matrix products in float8, on GPUs that have them (compute capability 8.9 and later); needs
triton, which comes with torch for them.

Weights and activations are cast to e4m3, gradients to e5m2, each tensor with one scale that
takes its largest magnitude to the format's (arXiv 2209.05433). cuBLAS reads both operands along
the dimension that is summed over, so what a gradient needs is cast into the other layout.

A tensor's largest magnitude stays on the GPU, as the bits of a float32 in an int32 [1]: bits of
magnitudes order as integers, with NaN above all, so that not-finite values make a scale, and all
that is cast with it, not finite.

Shape suffixes: N rows, I input size, O output size; R, C of any matrix.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 128  # rows and columns of a tile of the cast
CHUNK, CHUNKS = 4096, 8  # elements that a program of the search takes at once; how often


class Float8Weights:
    """Float8 copies of matrices [O, I] that share an input: side by side, in both layouts."""

    def __init__(self, weights: tuple[torch.Tensor, ...]):
        self.weights = weights
        self.sizes = [len(w) for w in weights]
        shape = sum(self.sizes), weights[0].shape[1]
        self.rows_OI = torch.empty(shape, dtype=VALUES, device=weights[0].device)
        self.rows_IO = torch.empty(shape[::-1], dtype=VALUES, device=weights[0].device)
        self.inverse_scale = torch.empty(1, device=weights[0].device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights again."""
        amax = amax_of(list(self.weights))
        parts = self.rows_OI.split(self.sizes), self.rows_IO.split(self.sizes, 1)
        for weight_OI, part_OI, part_IO in zip(self.weights, *parts, strict=True):
            cast(weight_OI, amax, part_OI, self.inverse_scale)
            cast(weight_OI, amax, part_IO.T, self.inverse_scale)

    def products(self, x_NI: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(x @ W.T for each matrix, [N, O]; the largest magnitude of x)."""
        amax = amax_of([x_NI])
        x8_NI, inverse_scale = (
            torch.empty_like(x_NI, dtype=VALUES),
            torch.empty_like(self.inverse_scale),
        )
        cast(x_NI, amax, x8_NI, inverse_scale)
        parts = self.rows_OI.split(self.sizes)
        return [
            scaled_mm(x8_NI, part.T, inverse_scale, self.inverse_scale, x_NI.dtype)
            for part in parts
        ], amax

    def input_gradient(
        self, dys: list[torch.Tensor], needed: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """(sum of dy @ W over the matrices, [N, I], if needed; the largest magnitude of all dy)."""
        amax = amax_of(dys)
        if not needed:
            return None, amax
        shape = len(dys[0]), sum(self.sizes)
        dy8_NO = torch.empty(shape, dtype=GRADIENTS, device=dys[0].device)
        inverse_scale = torch.empty_like(self.inverse_scale)
        for dy_NO, part_NO in zip(dys, dy8_NO.split(self.sizes, 1), strict=True):
            cast(dy_NO, amax, part_NO, inverse_scale)
        return scaled_mm(
            dy8_NO, self.rows_IO.T, inverse_scale, self.inverse_scale, dys[0].dtype
        ), amax


Parts = list[tuple[torch.Tensor, torch.Tensor]]  # tensors [N, .] and their largest magnitudes


def weight_gradients8(dys: list[Parts], xs: Parts) -> Iterator[torch.Tensor]:
    """For each of `dys`: the sum of dy.T @ x over the list, float32 [O, I]."""
    x_IN, x_inverse_scale = transposed(xs, VALUES)
    for dy in dys:
        dy_ON, dy_inverse_scale = transposed(dy, GRADIENTS)
        yield scaled_mm(dy_ON, x_IN.T, dy_inverse_scale, x_inverse_scale, torch.float32)


def transposed(parts: Parts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, C] each → float8 [C, all N], its inverse scale)."""
    tensors = [x for x, _ in parts]
    amax = torch.cat([n for _, n in parts]).amax(0, keepdim=True)
    sizes = [len(x) for x in tensors]
    out = torch.empty(tensors[0].shape[1], sum(sizes), dtype=dtype, device=amax.device)
    inverse_scale = torch.empty(1, device=amax.device)
    for part, place in zip(tensors, out.split(sizes, 1), strict=True):
        cast(part, amax, place.T, inverse_scale)
    return out, inverse_scale


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_inverse_scale: torch.Tensor,
    b_inverse_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(a * a_inverse_scale) @ (b * b_inverse_scale); a in rows, b in columns.

    Not with "fast accumulation", whose sums keep 14 bits: on an H200 it is 1 to 9 % faster and
    its result, 15 to 30 times further from the exact sum of the float8 values.
    """
    return torch._scaled_mm(a, b, scale_a=a_inverse_scale, scale_b=b_inverse_scale, out_dtype=dtype)


def amax_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in contiguous tensors, see above."""
    amax = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
    for x in tensors:
        grid = (triton.cdiv(x.numel(), CHUNK * CHUNKS),)
        amax_kernel[grid](x, amax, x.numel(), CHUNK, CHUNKS)
    return amax


@triton.jit
def amax_kernel(x, amax, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * CHUNK * CHUNKS
    most = tl.zeros([CHUNK], tl.int32)
    for n in range(CHUNKS):
        at = start + n * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(x + at, mask=at < size, other=0).to(tl.float32)
        most = tl.maximum(most, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax, tl.max(most, 0))


def cast(
    x_RC: torch.Tensor, amax: torch.Tensor, out_RC: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Write x, scaled so that the largest magnitude `amax` is the format's, to `out`, and
    what undoes the scale to `inverse_scale`, float32 [1]; x and out of any layout."""
    R, C = x_RC.shape
    limit = torch.finfo(out_RC.dtype).max
    grid = (triton.cdiv(R, TILE), triton.cdiv(C, TILE))
    strides = *x_RC.stride(), *out_RC.stride()
    cast_kernel[grid](x_RC, amax, out_RC, inverse_scale, R, C, *strides, limit, TILE, num_warps=8)


@triton.jit
def cast_kernel(
    x, amax, out, inverse_scale, R, C, x_R, x_C, out_R, out_C,
    LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    c = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (r < R) & (c < C)
    most = tl.load(amax).to(tl.float32, bitcast=True)
    most = tl.maximum(most, 1e-20, propagate_nan=tl.PropagateNan.ALL)
    value = tl.load(x + r * x_R + c * x_C, mask=inside).to(tl.float32) * (LIMIT / most)
    value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    # one store a kernel: with a second in the other layout, triton 3.6 left places unwritten
    tl.store(out + r * out_R + c * out_C, value.to(out.dtype.element_ty), mask=inside)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse_scale, most / LIMIT)
