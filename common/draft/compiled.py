"""Regions of elementwise work that a GPU runs as a compiled kernel or two each.

On a CPU they run as they are written: compiling costs more there than it saves.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

# A norm is used on several widths, with and without gradients. Past the limit torch would give up
# compiling, which for attention means holding every score.
torch._dynamo.config.recompile_limit = 32

F = TypeVar("F", bound=Callable[..., Any])


def region(function: F) -> F:
    """Run `function` compiled when its first argument is on a GPU.

    Matrix products stay outside, so a region is one or a few passes over memory. Rows may come in
    any number without compiling again: the first dimension of all but 1-D floating tensors, which
    are norms' weights.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not args[0].is_cuda:
            return function(*args)
        for arg in args:
            if isinstance(arg, torch.Tensor) and not is_norm_weight(arg):
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled()(*args)

    return call  # type: ignore[return-value]


def is_norm_weight(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.is_floating_point()
