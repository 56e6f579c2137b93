"""Regions of elementwise work that a GPU runs as one compiled kernel each.

On a CPU they run as they are written: compiling costs more there than it saves, and the two
are compared in tests/test_gpu.py.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def region(function: F) -> F:
    """Run `function` compiled when its first argument is on a GPU.

    Matrix products stay outside, so a region is one or a few passes over memory. The second
    length seen makes torch compile for any length; later ones compile nothing.
    """
    compiled = functools.cache(lambda: torch.compile(function, fullgraph=True))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return (compiled() if args[0].is_cuda else function)(*args)

    return call  # type: ignore[return-value]
