"""The vector functions of oneMKL (VML), through which torch takes cosines, logarithms and the like
on a CPU."""

import torch

FUNCTIONS = (torch.cos, torch.sin, torch.exp, torch.log, torch.sqrt)


def choose_kernels() -> None:
    """Have oneMKL choose its kernels now, in one thread.

    It chooses when a function is first called. Where several threads make that call at once, on
    Intel's CPUs, one of them may compute its part by a kernel of low precision (off by up to
    1e-4), so that a process's first rotary table, and all that follows, would differ from that
    of the next process. In torch's wheels up to 2.13 (oneMKL 2024.2); see
    https://github.com/pytorch/pytorch/issues/188792.
    """
    one = torch.ones(1)  # one element: no second thread takes part
    for function in FUNCTIONS:
        function(one)
