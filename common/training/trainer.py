"""The parts of 04's loop: what it is built of, one optimizer step, the held-out measure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from common.draft.config import DraftShape
from common.draft.linear_products import Products
from common.draft.model import Eagle3Draft, initialize
from common.draft.packed_row import PackedRow
from common.errors import UserError
from common.training import step
from common.training.loader import RowReader, rows_ahead
from common.training.ranks import ALONE, GradientSum, Ranks
from common.verifier.config import Verifier
from common.verifier.tensors import read_tensors


def build(
    verifier: Verifier,
    shape: DraftShape,
    d2t: np.ndarray,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> tuple[step.Teacher, Eagle3Draft]:
    """Return (teacher, fresh float32 draft) on the device; of the verifier, three tensors are
    read."""
    tensors = read_tensors(verifier, ("embed_tokens", "lm_head", "norm"))
    target_D = (torch.from_numpy(d2t) + torch.arange(len(d2t))).to(device)
    head_VH = tensors["lm_head"].to(device)
    teacher = step.Teacher(
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
    """A draft in training, its weights float32, and how it computes.

    Args:
        products: in the compute dtype, or in float8.
        optimizers: of the trained parameters; their learning rate is a step's.
        clip: largest norm of a step's gradient.
        ranks: the processes whose gradients are summed.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        products: Products,
        optimizers: list[torch.optim.Optimizer],
        clip: float,
        ranks: Ranks = ALONE,
    ):
        self.draft, self.products, self.optimizers = draft, products, optimizers
        self.clip, self.ranks = clip, ranks
        # what a server computes in
        self.eval_products = Products(products.dtype) if products.float8 else products

    def backward(
        self,
        teacher: step.Teacher,
        row: PackedRow,
        weights: list[float],
        summed: GradientSum | None = None,
    ) -> torch.Tensor:
        """Add a row's gradients, which a step's last row passes on to be summed over ranks; returns
        its sums, see step_loss."""
        loss, sums = step.step_loss(self.draft, self.products, teacher, row, weights)
        loss.backward()
        if summed is None:
            self.products.add_gradients()
            return sums
        for parameter in self.draft.parameters():
            if parameter.grad is not None and parameter.dim() == 1:
                summed.done(parameter)
        self.products.add_gradients(summed.done)
        return sums

    def step(
        self,
        teacher: step.Teacher,
        rows: Iterator[PackedRow],
        count: int,
        weights: list[float],
        lr: float,
        stop: int = 0,
    ) -> "StepSums":
        """One optimizer step over this rank's next `count` rows; does not wait for a GPU.

        Args:
            weights: of each depth's summed KL, for the sum over all ranks' rows to be a mean.
            stop: nonzero where this rank was asked to end; see StepSums.stop.
        """
        sums = torch.zeros(2, len(weights), device=self.draft.fc.weight.device)
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        summed = GradientSum(self.ranks, trained[::-1]) if self.ranks.world > 1 else None
        for n in range(count):
            last = n == count - 1
            sums += self.backward(teacher, next(rows), weights, summed if last else None)
        if summed is not None:
            summed.finish()
        ends = torch.full((1,), float(stop), device=sums.device)
        noted = self.ranks.sum(torch.cat([sums.flatten(), ends]))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(trained, self.clip)
        for optimizer in self.optimizers:
            with self.ranks.together():
                optimizer.step()
            optimizer.zero_grad()
        self.products.refresh()
        return StepSums.fetch(torch.cat([noted, norm.view(1)]), weights)


@dataclass
class StepSums:
    """What a step measured, on its way from the device."""

    values: torch.Tensor  # float32 [2K + 2] on the CPU: sums of KL, hits; stop; gradient norm
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

    def wait(self) -> list[float]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to end before this step; waits for the step."""
        return self.wait()[-2] > 0

    def metrics(self, step: int, counts: list[int]) -> dict:
        """What metrics.jsonl notes; waits for the step.

        UserError where the loss or its gradient is not finite.

        Args:
            counts: predictions with loss at each depth, of all ranks.
        """
        K = len(self.weights)
        *sums, _stop, norm = self.wait()
        loss = sum(w * s for w, s in zip(self.weights, sums[:K], strict=True))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise UserError(
                f"the loss of step {step} is {loss} and its gradient's norm {norm}; nothing of it"
                " is saved. Lower --lr and start again with --overwrite"
            )
        depths = [k for k in range(K) if counts[k]]
        return {
            "loss": round(loss, 6),
            "loss_by_depth": [round(sums[k] / counts[k], 6) for k in depths],
            "accuracy_by_depth": [round(sums[K + k] / counts[k], 4) for k in depths],
            "grad_norm": round(norm, 4),
        }


# Dense bfloat16 matrix products, TFLOP/s, from NVIDIA's data sheets; the first name that fits.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "B200": 2250,
    "A100": 312,
    "RTX PRO 6000": 504,
}


def device_use(device: str, flops_per_second: float) -> dict[str, float]:
    """TFLOP/s, and on a GPU the share of its peak in bfloat16 (MFU, %), in which float8 products
    count as much, and the most memory held (GB)."""
    use = {"tflops": round(flops_per_second / 1e12, 3)}
    if device == "cpu":
        return use
    name = torch.cuda.get_device_name()
    peak = next((x for key, x in PEAK_TFLOPS.items() if key in name), None)
    if peak:
        use["mfu_percent"] = round(flops_per_second / 1e10 / peak, 1)
    return use | {"memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}


def measure(
    trainer: Trainer, teacher: step.Teacher, reader: RowReader, rows: list[list[int]]
) -> dict:
    """Held-out accuracy a depth and the acceptance length they imply, over all ranks."""
    ranks, device = trainer.ranks, trainer.draft.fc.weight.device.type
    if trainer.eval_products is not trainer.products:
        trainer.eval_products.refresh()
    counts = torch.zeros(reader.depths, 4, dtype=torch.int64)
    for row in rows_ahead(reader, rows[ranks.rank :: ranks.world], device):
        counts += step.heldout_counts(trainer.draft, trainer.eval_products, teacher, row)
    counts = ranks.sum(counts.to(device)).cpu()
    found = step.acceptance(counts)
    return {"heldout_accuracy": found.pop("accuracy"), **found}


def rehearse(trainer: Trainer, teacher: step.Teacher, row: PackedRow) -> None:
    """Run everything that compiles once, on a GPU, and forget it.

    Kernels are made for the sizes first seen. A run that goes on begins elsewhere in the plan,
    and would get others, with other last bits, if the first row were not always the same.
    """
    trainer.backward(teacher, row, [1.0] * len(row.tokens_KN))
    for parameter in trainer.draft.parameters():
        parameter.grad = None
    step.heldout_counts(trainer.draft, trainer.eval_products, teacher, row)


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
