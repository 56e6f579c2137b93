"""One optimizer step: the loss of packed rows over all TTT depths, its gradients, the update.

Shape suffixes: n losses of one depth, U target states, K depths, H hidden size, D draft
vocabulary, V verifier's.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from common.draft.linear_products import LinearProducts
from common.draft.losses import linear_kl, target_probs
from common.draft.model import Eagle3Draft, rms_norm_region, ttt_states
from common.draft.packed_row import PackedRow
from common.errors import UserError
from common.training.ranks import ALONE, GradientSum, Ranks
from common.verifier.head import HeadFacts
from common.verifier.logits import verifier_logits


@dataclass(frozen=True)
class Target:
    """The verifier's side of the loss: its tensors, frozen, on the training device.

    embed_VH, head_VH, bias_V: embedding and head (bias None without one); head_DH, bias_D: the
    head's rows of the draft's vocabulary, all in the compute dtype; norm_H (float32): final norm;
    token_D: the verifier's token of each id of the draft's vocabulary.
    """

    facts: HeadFacts
    embed_VH: torch.Tensor
    head_VH: torch.Tensor
    bias_V: torch.Tensor | None
    head_DH: torch.Tensor
    bias_D: torch.Tensor | None
    norm_H: torch.Tensor
    token_D: torch.Tensor

    def draft_logits(self, row: PackedRow) -> torch.Tensor:
        """The verifier's logits over the draft's vocabulary at the row's target states, [U, D]."""
        return verifier_logits(self.normed(row), self.head_DH, self.bias_D, self.facts)

    def tokens(self, row: PackedRow) -> torch.Tensor:
        """The verifier's own choice of its full vocabulary, int64 [U]; 512 rows at a time, for the
        logits would fill a GPU."""
        parts = self.normed(row).split(512)
        logits = (verifier_logits(x, self.head_VH, self.bias_V, self.facts) for x in parts)
        return torch.cat([x.argmax(-1) for x in logits])

    def normed(self, row: PackedRow) -> torch.Tensor:
        """The final norm of the row's target states, [U, H]."""
        return rms_norm_region(row.last(self.head_DH.dtype), self.norm_H, self.facts.norm_eps)


def step_loss(
    draft: Eagle3Draft,
    linears: LinearProducts,
    target: Target,
    row: PackedRow,
    weights: list[float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, float32 [2, K]: each depth's sum of KL, and its hits).

    The loss is sum_k weights[k] * sum over M[k] of KL(verifier || draft). A hit is the draft's
    argmax being the data's token; one outside the draft's vocabulary is none. The gradients of
    matrices are there when the backward pass is over and linears.add_gradients() has run.
    """
    states = ttt_states(draft, linears, target.embed_VH, row)
    with torch.no_grad():
        probs = target_probs(target.draft_logits(row))
    loss = torch.zeros((), device=row.ids_T.device)
    sums = torch.zeros(2, len(weights), device=row.ids_T.device)
    for k, (one, state_NH) in enumerate(zip(row.losses, states, strict=True)):
        state_nH, head = draft.norm(state_NH[one.at_n]), draft.lm_head.weight
        total, predicted = linear_kl(linears, state_nH, head, probs, one.target_n, one.real)
        loss = loss + weights[k] * total
        sums[0, k] = total.detach()
        sums[1, k] = (target.token_D[predicted] == one.label_n[: one.real]).sum()
    return loss, sums


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@dataclass
class Trainer:
    """A draft in training, its weights float32, and how it computes.

    Args:
        linears: in the compute dtype, or in float8.
        optimizers: of the trained parameters; their learning rate is a step's.
        clip: largest norm of a step's gradient.
        ranks: the processes whose gradients are summed.
    """

    draft: Eagle3Draft
    target: Target
    linears: LinearProducts
    optimizers: list[torch.optim.Optimizer]
    clip: float
    ranks: Ranks = ALONE

    @cached_property
    def eval_linears(self) -> LinearProducts:
        """What a server computes in: the compute dtype."""
        return LinearProducts(self.linears.dtype) if self.linears.float8 else self.linears

    def backward(
        self, row: PackedRow, weights: list[float], summed: GradientSum | None = None
    ) -> torch.Tensor:
        """Add a row's gradients, which a step's last row passes on to be summed over ranks; returns
        its sums, see step_loss."""
        loss, sums = step_loss(self.draft, self.linears, self.target, row, weights)
        loss.backward()
        if summed is None:
            self.linears.add_gradients()
            return sums
        for parameter in self.draft.parameters():
            if parameter.grad is not None and parameter.dim() == 1:
                summed.done(parameter)
        self.linears.add_gradients(summed.done)
        return sums

    def step(
        self,
        rows: Iterator[PackedRow],
        count: int,
        weights: list[float],
        lr: float,
        stop: int = 0,
    ) -> "StepSums":
        """One optimizer step over this rank's next `count` rows; does not wait for a GPU.

        Args:
            weights: of each depth's summed KL, for the sum over all ranks' rows to be a mean.
            stop: nonzero where this rank got a signal to end; see StepSums.stop.
        """
        sums = torch.zeros(2, len(weights), device=self.draft.fc.weight.device)
        trained = [p for p in self.draft.parameters() if p.requires_grad]
        summed = GradientSum(self.ranks, trained[::-1]) if self.ranks.world > 1 else None
        for n in range(count):
            last = n == count - 1
            sums += self.backward(next(rows), weights, summed if last else None)
        if summed is not None:
            summed.finish()
        ends = torch.full((1,), float(stop), device=sums.device)
        noted = self.ranks.sum(torch.cat([sums.flatten(), ends]))
        norm = torch.nn.utils.clip_grad_norm_(trained, self.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            with self.ranks.collective():
                optimizer.step()
            optimizer.zero_grad()
        self.linears.refresh()
        return StepSums.fetch(torch.cat([noted, norm.view(1)]), weights)


@dataclass(frozen=True)
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
        """The values; waits for the step."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()

    @property
    def stop(self) -> bool:
        """Whether any rank got a signal to end before this step; waits for the step."""
        return self.wait()[-2] > 0

    def metrics(self, step: int, counts: list[int]) -> dict[str, Any]:
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
