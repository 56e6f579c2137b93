"""The processes of one training run, as torchrun starts them: one a GPU (on CPUs, gloo).

Every rank holds the weights and trains on its own rows of a step; gradients are summed over
ranks, and each rank keeps the optimizer state of a part of the parameters (ZeRO-1).
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from common.cli import UserError

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

    def in_turn(self, function: Callable[[], T]) -> T:
        """Run on the first rank, then on the others, which see what it left on the disk."""
        if not self.first:
            with self.together():
                dist.barrier()
        try:
            return function()
        finally:
            if self.first and self.world > 1:
                with self.together():
                    dist.barrier()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all ranks, in place."""
        if self.world > 1:
            with self.together():
                dist.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For what waits for the other ranks: UserError where one of them has ended. (NCCL
        raises nothing: see training_log.)"""
        try:
            yield
        except RuntimeError as e:
            if not (isinstance(e, dist.DistError) or GLOO.search(str(e))):
                raise  # of this rank's own
            raise self.lost() from None

    def lost(self) -> UserError:
        return UserError(
            f"rank {self.rank} has lost another rank: that one was killed, or says its reason"
            " itself; run the same command again to continue from the last state"
        )

    def agree(self, ok: bool) -> bool:
        """Whether all ranks are ok; waits for all of them."""
        if self.world == 1:
            return ok
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        failed = torch.tensor(float(not ok), device=device)
        return float(self.sum(failed)) == 0


ALONE = Ranks()


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
    # the first rank's checks of a large data set are waited for
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(hours=2))
    return Ranks(dist.get_rank(), int(world))
