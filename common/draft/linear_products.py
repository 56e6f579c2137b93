"""The draft's matrix products in a training step, in the compute dtype or in float8.

The weights are float32, as the optimizer moves them; products run on copies made once per step.
The gradient of a matrix waits until a row's backward pass is over and is then one product over
all its TTT steps, summed in float32, instead of one per step added up in the compute dtype.

Shape suffixes: N rows, I input size, O output size.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from common.draft.float8 import Float8Weights


class LinearProducts:
    """Products of activations with a draft's matrices.

    Args:
        dtype: of activations, and of the copies; float32 uses the weights themselves.
        float8: multiply by linears in float8 (see float8.py), on a GPU. The head's products
            (see losses.py) stay in `dtype`.
    """

    def __init__(self, dtype: torch.dtype, float8: bool = False):
        self.dtype, self.float8 = dtype, float8
        self._copies: dict[torch.Tensor, torch.Tensor] = {}
        self._float8: dict[tuple[torch.Tensor, ...], Float8Weights] = {}
        self._uses: dict[torch.Tensor, list[tuple[Operand, Operand]]] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the copies after the weights have changed."""
        for weight, copy in self._copies.items():
            copy.copy_(weight)
        for weights in self._float8.values():
            weights.refresh()

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in the compute dtype, without a gradient."""
        if weight.dtype == self.dtype:
            return weight.detach()
        if weight not in self._copies:
            self._copies[weight] = weight.detach().to(self.dtype)
        return self._copies[weight]

    def copies8(self, weights: tuple[torch.Tensor, ...]) -> "Float8Weights":
        """The float8 copies of matrices that share an input."""
        from common.draft.float8 import Float8Weights

        if weights not in self._float8:
            self._float8[weights] = Float8Weights(weights)
        return self._float8[weights]

    def product(self, x_NI: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        """x @ W.T, [N, O]."""
        return Product.apply(self, x_NI, layer.weight)[0]

    def products(self, x_NI: torch.Tensor, *layers: nn.Linear) -> tuple[torch.Tensor, ...]:
        """The products of one input with several matrices, [N, O] each."""
        return Product.apply(self, x_NI, *(layer.weight for layer in layers))

    def used(self, weight: torch.Tensor, x_NI: "Operand", dy_NO: "Operand") -> None:
        """Note a product whose part of the weight's gradient is dy.T @ x."""
        self._uses.setdefault(weight, []).append((x_NI, dy_NO))

    @torch.no_grad()
    def add_gradients(self, done: Callable[[torch.Tensor], None] = lambda weight: None) -> None:
        """Add what the backward passes since the last call have left to the weights' gradients;
        calls `done` with each weight, as soon as its gradient is launched."""
        # matrices that had the same inputs share them
        groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for weight, uses in self._uses.items():
            groups.setdefault(tuple(id(x.values) for x, _ in uses), []).append(weight)
        for weights in groups.values():
            xs = [x for x, _ in self._uses[weights[0]]]
            dys = [[dy for _, dy in self._uses.pop(weight)] for weight in weights]
            for weight, gradient_OI in zip(weights, weight_gradients(dys, xs), strict=True):
                if weight.grad is None:
                    weight.grad = gradient_OI
                else:
                    weight.grad += gradient_OI
                done(weight)


class Operand(NamedTuple):
    """A matrix of a product, [N, .]; of one in float8 also its largest magnitude."""

    values: torch.Tensor
    amax: torch.Tensor | None = None


def weight_gradients(dys: list[list[Operand]], xs: list[Operand]) -> Iterator[torch.Tensor]:
    """For each of `dys`: the sum of dy.T @ x over the list, float32 [O, I]."""
    if xs[0].amax is not None:
        from common.draft.float8 import weight_gradients8

        yield from weight_gradients8(dys, xs)  # type: ignore[arg-type]
        return
    x_NI = concatenated(xs)
    for dy in dys:
        dy_ON = concatenated(dy).T
        if x_NI.is_cuda and x_NI.dtype != torch.float32:
            yield torch.mm(dy_ON, x_NI, out_dtype=torch.float32)
        else:
            yield (dy_ON @ x_NI).float()


def concatenated(parts: list[Operand]) -> torch.Tensor:
    """The matrices below each other, [all N, .]."""
    return parts[0].values if len(parts) == 1 else torch.cat([x.values for x in parts])


class Product(torch.autograd.Function):
    """See LinearProducts.products."""

    @staticmethod
    def forward(
        ctx: Any, linears: LinearProducts, x_NI: torch.Tensor, *weights: torch.Tensor
    ) -> Any:
        ctx.linears, ctx.weights, ctx.amax = linears, weights, None
        ctx.save_for_backward(x_NI)
        if linears.float8:
            ys, ctx.amax = linears.copies8(weights).products(x_NI.contiguous())
            return tuple(ys)
        return tuple(x_NI @ linears.copy(weight).T for weight in weights)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        linears, weights = ctx.linears, ctx.weights
        (x_NI,) = ctx.saved_tensors
        dys = tuple(dy.contiguous() for dy in dys)
        dx_NI = dy_amax = None
        if linears.float8:
            copies = linears.copies8(weights)
            dx_NI, dy_amax = copies.input_gradient(list(dys), ctx.needs_input_grad[1])
        elif ctx.needs_input_grad[1]:
            dx_NI = dys[0] @ linears.copy(weights[0])
            for weight, dy_NO in zip(weights[1:], dys[1:], strict=True):
                dx_NI.addmm_(dy_NO, linears.copy(weight))
        for weight, dy_NO in zip(weights, dys, strict=True):
            linears.used(weight, Operand(x_NI, ctx.amax), Operand(dy_NO, dy_amax))
        return None, dx_NI, *[None] * len(weights)
