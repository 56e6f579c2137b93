"""The first step of a process is computed as its later ones are."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import vml
from common.draft.linear_products import LinearProducts
from common.training.heldout import heldout_counts
from common.training.optimizers import make_optimizers
from common.training.step import step_loss
from tests.conftest import ENVIRONMENT, ended, python
from tests.test_eagle3 import DEPTHS, fresh, pack, sample, shape, target

# ATen's functions that run in oneMKL's VML: aten/src/ATen/cpu/vml.h
VML = {
    "abs", "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log",
    "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
}  # fmt: skip
PROCESSES = 40


def step(draft, t, row):
    """(loss and sums, gradients) of one step."""
    linears = LinearProducts(torch.float32)
    draft.zero_grad()
    loss, sums = step_loss(draft, linears, t, row, [1.0] * DEPTHS)
    loss.backward()
    linears.add_gradients()
    return [loss.detach(), sums, *(p.grad.clone() for p in draft.parameters())]


def test_first_steps_equal_second_ones():
    """In processes that are young: where a function of VML is not settled, some of them differ
    on a CPU of Intel's (on others none does)."""
    code = f"""
import os, torch
from common import vml
from tests.test_vml import *
t, row = None, None
wrong = 0
for n in range({PROCESSES}):
    child = os.fork()  # before any thread is there
    if child:
        wrong += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        continue
    vml.choose_kernels()
    t = target()
    row, draft = pack([sample(1, [(300, 400)])]), fresh(shape(), t)
    first, second = step(draft, t, row), step(draft, t, row)
    os._exit(not all(map(torch.equal, first, second)))
print(wrong)
"""
    # two threads, also where pytest's workers have one each
    run = ended(python(["-c", code], fresh=True, env=ENVIRONMENT | {"OMP_NUM_THREADS": "2"}))
    assert run.stdout == "0\n", run.stderr


def test_all_functions_of_a_step_are_settled():
    """Forward, backward, held-out measure and both optimizers."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.add(func.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_"))
            return func(*args, **(kwargs or {}))

    called: set[str] = set()
    t = target()
    draft, row = fresh(shape(), t), pack([sample(1, [(5, 7)])])
    with Names():
        heldout_counts(draft, LinearProducts(torch.float32), t, row)
        for name in "adamw", "muon":
            step(draft, t, row)
            for optimizer in make_optimizers(draft, name, 1e-3, 0.01, 1):
                optimizer.step()
    assert {"cos", "sin", "log"} <= called  # or the names are not seen as they are here
    assert called & VML <= {f.__name__ for f in vml.FUNCTIONS}
