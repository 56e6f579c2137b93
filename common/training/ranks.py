"""The processes of one training run, as torchrun starts them: one per GPU (on CPUs, gloo).

Every rank holds the weights and trains on its own rows of a step; gradients are summed over
ranks, and each rank keeps the optimizer state of a part of the parameters (ZeRO-1).
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from common.errors import UserError, again, report_error
from common.progress import log

# torchrun sends SIGTERM to the ranks when one of them has ended, or it got a signal itself, and
# SIGKILL 30 seconds later.
LATE_SECONDS = 25
GLOO = re.compile("gloo|connection", re.I)  # its errors have no class of their own
T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's place: `rank` of `world`."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, rows: list[T]) -> list[T]:
        """This rank's rows of a step."""
        return rows[self.rank :: self.world]

    def log(self, text: str) -> None:
        """Log a line once, that all ranks would log."""
        if self.first:
            log(text)

    def main_process_first(self, function: Callable[[], T]) -> T:
        """Run on the first rank, then on the others, which see what it left on the disk."""
        if not self.first:
            with self.collective():
                dist.barrier()
        try:
            return function()
        finally:
            if self.first and self.world > 1:
                with self.collective():
                    dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place."""
        if self.world > 1:
            with self.collective():
                dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Around what waits for the other ranks: UserError where one of them has ended. (NCCL
        raises nothing: see end_when_late.)"""
        try:
            yield
        except RuntimeError as e:
            if not (isinstance(e, dist.DistError) or GLOO.search(str(e))):
                raise  # of this rank's own
            raise UserError(
                f"rank {self.rank} has lost another rank: it was killed, or its own log"
                f" says why it ended; {again()} to continue from the last state"
            ) from None

    def all_ok(self, ok: bool) -> bool:
        """Whether all ranks are ok; waits for all of them."""
        if self.world == 1:
            return ok
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        failed = torch.tensor(float(not ok), device=device)
        return float(self.sum(failed)) == 0


ALONE = Ranks()


class GradientSum:
    """Adds up gradients over all ranks, each while the next ones are computed.

    All ranks must start their sums in one order, whatever order their gradients are done in.

    Args:
        parameters: in that order; best in that of the backward pass.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[torch.Tensor]):
        self.ranks, self._left = ranks, deque(parameters)
        self._done: set[torch.Tensor] = set()
        self._pending: list[dist.Work] = []

    def done(self, parameter: torch.Tensor) -> None:
        """This rank's gradient of the parameter is complete."""
        self._done.add(parameter)
        with self.ranks.collective():
            while self._left and self._left[0] in self._done:
                gradient = self._left.popleft().grad
                self._pending.append(dist.all_reduce(gradient, async_op=True))

    def finish(self) -> None:
        """Start what is left, with zeros where this rank has nothing, and have the work that
        follows wait for all sums."""
        for parameter in list(self._left):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.done(parameter)
        with self.ranks.collective():
            for work in self._pending:
                work.wait()


def start_ranks(device: str) -> Ranks:
    """Join the other processes that torchrun started, if it did."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world == "1":
        return ALONE
    places = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "MASTER_PORT")]
    if not all(x.isdecimal() for x in [world, *places]) or "MASTER_ADDR" not in os.environ:
        raise UserError(
            f"WORLD_SIZE is {world}, but the rest of what torchrun sets is not there; start several"
            " processes by torchrun, or unset it"
        )
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise UserError(
                f"torchrun started process {local} on this machine, which has"
                f" {torch.cuda.device_count()} GPUs; lower --nproc-per-node"
            )
        torch.cuda.set_device(local)
    end_when_late()
    # the first rank's checks of a large data set are waited for
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(hours=2))
    return Ranks(dist.get_rank(), int(world))


def end_when_late(seconds: float = LATE_SECONDS) -> None:
    """From now on, end this process with an error where it still runs so long after SIGTERM or
    SIGINT: NCCL waits without end for a rank that is gone, and in C, where Python sees no signal.
    Call it from the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def watch() -> None:
        while os.read(reader, 1)[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        time.sleep(seconds)
        report_error(
            f"{seconds:g} s after the signal this rank still waits for another one (killed, or"
            f" ended by an error that its own log shows), or it still computes; {again()} to"
            " continue from the last state"
        )
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
