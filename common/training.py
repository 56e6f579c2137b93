"""The parts of 04's loop: what it is built of, one optimizer step, the held-out measure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from common import ttt_step
from common.cli import UserError
from common.draft_shape import DraftShape
from common.eagle3 import Eagle3Draft, initialize
from common.loading import RowReader, rows_ahead
from common.packed_row import PackedRow
from common.verifier import Verifier, read_tensors


def build(
    verifier: Verifier,
    shape: DraftShape,
    d2t: np.ndarray,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> tuple[ttt_step.Teacher, Eagle3Draft]:
    """Return (teacher in the compute dtype, fresh float32 draft) on the device; of the
    verifier, three tensors are read."""
    tensors = read_tensors(verifier, ("embed_tokens", "lm_head", "norm"))
    target_D = (torch.from_numpy(d2t) + torch.arange(len(d2t))).to(device)
    head_VH = tensors["lm_head"].to(device)
    teacher = ttt_step.Teacher(
        embed_VH=tensors["embed_tokens"].to(device, dtype),
        head_VH=head_VH.to(dtype),
        head_DH=head_VH[target_D].to(dtype),
        norm_H=tensors["norm"].to(device, torch.float32),
        eps=verifier.rms_norm_eps,
        target_D=target_D,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        draft = Eagle3Draft(shape)
    initialize(draft, head_VH[target_D])
    return teacher, draft


class Trainer:
    """A draft in training: float32 `masters` that the optimizer moves, and `draft`, what runs:
    a copy with its matrices in the compute dtype (the masters themselves in float32).

    Args:
        clip: largest norm of a step's gradient.
    """

    def __init__(
        self,
        masters: Eagle3Draft,
        dtype: torch.dtype,
        optimizer: torch.optim.Optimizer,
        clip: float,
    ):
        self.masters, self.optimizer, self.clip = masters, optimizer, clip
        self.draft = masters if dtype == torch.float32 else compute_copy(masters, dtype)
        self._pairs = list(zip(masters.parameters(), self.draft.parameters(), strict=True))
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters to the draft that runs."""
        for master, copy in self._pairs:
            if copy is not master:
                copy.copy_(master)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the draft that ran to the masters'."""
        for master, copy in self._pairs:
            if copy is master or copy.grad is None:
                continue
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad += copy.grad
            copy.grad = None

    def step(
        self,
        teacher: ttt_step.Teacher,
        rows: Iterable[PackedRow],
        weights: list[float],
        lr: float,
    ) -> "StepSums":
        """One optimizer step; does not wait for a GPU.

        Args:
            weights: of each depth's summed KL, for the sum over the rows to be a mean.
        """
        sums = None
        for row in rows:
            loss, one = ttt_step.step_loss(self.draft, teacher, row, weights)
            loss.backward()
            self.collect()
            sums = one if sums is None else sums + one
        assert sums is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        trained = [p for p in self.masters.parameters() if p.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trained, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        return StepSums.fetch(torch.cat([sums.flatten(), norm.view(1)]), weights)


def compute_copy(masters: Eagle3Draft, dtype: torch.dtype) -> Eagle3Draft:
    """A draft with the masters' shape whose matrices are in `dtype`; norms stay float32."""
    with torch.device("meta"):
        draft = Eagle3Draft(masters.shape)
    draft.to_empty(device=masters.fc.weight.device)
    for master, copy in zip(masters.parameters(), draft.parameters(), strict=True):
        copy.requires_grad_(master.requires_grad)
        if copy.dim() == 2:
            copy.data = copy.data.to(dtype)
    return draft


@dataclass
class StepSums:
    """What a step measured, on its way from the device: see `metrics`."""

    values: torch.Tensor  # float32 [2K + 1] on the CPU: sums of KL, hits, gradient norm
    copied: torch.cuda.Event | None
    weights: list[float]

    @classmethod
    def fetch(cls, values: torch.Tensor, weights: list[float]) -> "StepSums":
        """Start the copy to the CPU."""
        if not values.is_cuda:
            return cls(values, None, weights)
        there = torch.empty(values.shape, pin_memory=True)
        there.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(there, copied, weights)

    def metrics(self, step: int, counts: list[int]) -> dict:
        """What metrics.jsonl notes; UserError where the loss or its gradient is not finite.

        Args:
            counts: predictions with loss at each depth.
        """
        if self.copied is not None:
            self.copied.synchronize()
        K = len(self.weights)
        *sums, norm = self.values.tolist()
        loss = sum(w * s for w, s in zip(self.weights, sums[:K], strict=True))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(
                f"the loss of step {step} is {loss} and its gradient's norm {norm}; nothing of it"
                " is saved. Lower --lr and start again with --overwrite"
            )
        depths = [k for k in range(K) if counts[k]]
        return {
            "loss": round(loss, 5),
            "loss_by_depth": [round(sums[k] / counts[k], 5) for k in depths],
            "accuracy_by_depth": [round(sums[K + k] / counts[k], 4) for k in depths],
            "grad_norm": round(norm, 4),
        }


def measure(
    draft: Eagle3Draft,
    teacher: ttt_step.Teacher,
    reader: RowReader,
    rows: list[list[int]],
    device: str,
) -> dict:
    """Held-out accuracy a depth and the acceptance length they imply."""
    counts = torch.zeros(reader.depths, 4, dtype=torch.int64)
    for row in rows_ahead(reader, rows, device):
        counts += ttt_step.heldout_counts(draft, teacher, row)
    found = ttt_step.acceptance(counts)
    return {"heldout_accuracy": found.pop("accuracy"), **found}


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
