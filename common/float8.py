"""Matrix products in float8, on GPUs that have them (compute capability 8.9 and later); needs
triton, which comes with torch for them.

Weights and activations are cast to e4m3, gradients to e5m2, each tensor with one scale that
takes its largest magnitude to the format's (arXiv 2209.05433). cuBLAS reads both operands along
the dimension that is summed over, so what a gradient needs is cast into the other layout.

Shape suffixes: N rows, I input size, O output size.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128  # rows and columns of a tile of the cast


class Float8Weights:
    """Float8 copies of matrices [O, I] that share an input: side by side, in both layouts."""

    def __init__(self, weights: tuple[torch.Tensor, ...]):
        self.weights = weights
        self.sizes = [len(w) for w in weights]
        shape = sum(self.sizes), weights[0].shape[1]
        self.rows_OI = torch.empty(shape, dtype=VALUES, device=weights[0].device)
        self.rows_IO = torch.empty(shape[::-1], dtype=VALUES, device=weights[0].device)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the weights again."""
        scale, self.inverse = scales(list(self.weights), VALUES)
        for weight_OI, part_OI, part_IO in zip(
            self.weights,
            self.rows_OI.split(self.sizes),
            self.rows_IO.split(self.sizes, 1),
            strict=True,
        ):
            cast(weight_OI, scale, part_OI)
            cast(weight_OI, scale, part_IO.T)

    def products(self, x_NI: torch.Tensor) -> list[torch.Tensor]:
        """x @ W.T for each matrix, [N, O]."""
        scale, inverse = scales([x_NI], VALUES)
        x8_NI = torch.empty(x_NI.shape, dtype=VALUES, device=x_NI.device)
        cast(x_NI, scale, x8_NI)
        return [
            scaled_mm(x8_NI, part_OI.T, inverse, self.inverse, x_NI.dtype)
            for part_OI in self.rows_OI.split(self.sizes)
        ]

    def input_gradient(self, dys: list[torch.Tensor]) -> torch.Tensor:
        """Sum of dy @ W over the matrices, [N, I]."""
        scale, inverse = scales(dys, GRADIENTS)
        shape = len(dys[0]), sum(self.sizes)
        dy8_NO = torch.empty(shape, dtype=GRADIENTS, device=dys[0].device)
        for dy_NO, part_NO in zip(dys, dy8_NO.split(self.sizes, 1), strict=True):
            cast(dy_NO, scale, part_NO)
        return scaled_mm(dy8_NO, self.rows_IO.T, inverse, self.inverse, dys[0].dtype)


def outers8(dys: list[list[torch.Tensor]], xs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """For each of `dys`: the sum of dy.T @ x over the list, float32 [O, I]."""
    x_IN, x_inverse = transposed(xs, VALUES)
    for dy in dys:
        dy_ON, dy_inverse = transposed(dy, GRADIENTS)
        yield scaled_mm(dy_ON, x_IN.T, dy_inverse, x_inverse, torch.float32)


def transposed(parts: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, C] each → float8 [C, all N], its inverse scale)."""
    scale, inverse = scales(parts, dtype)
    sizes = [len(x) for x in parts]
    out = torch.empty(parts[0].shape[1], sum(sizes), dtype=dtype, device=parts[0].device)
    for part, place in zip(parts, out.split(sizes, 1), strict=True):
        cast(part, scale, place.T)
    return out, inverse


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, a_inverse: Any, b_inverse: Any, dtype: torch.dtype
) -> torch.Tensor:
    """(a * a_inverse) @ (b * b_inverse); a in rows, b in columns.

    Not with "fast accumulation", whose sums keep 14 bits: on an H200 it is 1 to 9 % faster and
    its result, 25 times further from the exact sum of the float8 values.
    """
    return torch._scaled_mm(a, b, scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype)


def scales(tensors: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor that takes the largest magnitude to the format's, its inverse), float32 scalars.

    Not-finite values make both not finite, and so whatever is cast with them.
    """
    norms = torch._foreach_norm(tensors, ord=float("inf"), dtype=torch.float32)
    largest = torch.stack(norms).amax().clamp(min=1e-20)
    limit = torch.finfo(dtype).max
    return limit / largest, largest / limit


def cast(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write x * scale, [R, C], to `out` [R, C] of either layout."""
    R, C = x.shape
    grid = (-(-R // BLOCK), -(-C // BLOCK))
    limit = torch.finfo(out.dtype).max
    cast_kernel[grid](x, scale, out, R, C, *x.stride(), *out.stride(), limit, BLOCK, num_warps=8)


@triton.jit
def cast_kernel(
    x, scale, out, R, C, x_R, x_C, out_R, out_C, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (r < R) & (c < C)
    value = tl.load(x + r * x_R + c * x_C, mask=inside).to(tl.float32) * tl.load(scale)
    value = tl.clamp(value, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + r * out_R + c * out_C, value.to(out.dtype.element_ty), mask=inside)
