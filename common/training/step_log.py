"""What a training run notes as it goes: each step, each epoch's held-out measure, the best."""

import time
from pathlib import Path
from typing import Any

import torch

from common.draft.config import DraftShape, flops_of_step
from common.errors import UserError
from common.progress import Progress, log
from common.training import step
from common.training.loader import RowReader
from common.training.metrics import Metrics
from common.training.packing import Step, Work
from common.training.trainer import StepSums, Trainer, device_use, measure


class StepLog:
    """Notes each step when its sums are there: on a GPU a step later, so that it never waits.

    Only the first rank prints and writes; `spent` sums the seconds of all steps of all runs.

    Args:
        steps, tokens: the plan, and the tokens of each of its steps.
        begun, measured: steps that earlier runs have done, and the last that was measured after.
        reader: of the steps' rows.
    """

    def __init__(
        self,
        out: Path,
        steps: list[Step],
        tokens: list[int],
        begun: int,
        measured: int,
        spent: float,
        trainer: Trainer,
        reader: RowReader,
        tensorboard: bool,
    ):
        self.reader = reader
        self.steps, self.tokens, self.spent = steps, tokens, spent
        self.trainer = trainer
        self._launched: tuple[int, StepSums, Work, float] | None = None
        self.metrics = self.bar = None
        if trainer.ranks.first:
            self.metrics = Metrics(out, begun, measured, tensorboard)
            self.bar = Progress("train", sum(tokens), "tokens", initial=sum(tokens[:begun]))
        self.restart()

    def restart(self) -> None:
        """The next step's time counts from now."""
        self._last = time.monotonic()

    def add(self, number: int, sums: StepSums, work: Work, lr: float) -> bool:
        """Take a launched step and note the one before; returns whether to stop.

        Args:
            number: of the step, from 1.
        """
        stop = self.settle()
        self._launched = (number, sums, work, lr)
        return stop if sums.copied is not None else self.settle()

    def settle(self) -> bool:
        """Wait for the step launched last, and note it; returns whether any rank was asked to
        stop before it. UserError where its loss or gradient is not finite, which names the file
        that is to blame, if one is."""
        if self._launched is None:
            return False
        number, sums, work, lr = self._launched
        self._launched = None
        try:
            found = sums.metrics(number, work.losses)
        except UserError:
            for row in self.steps[number - 1].rows:
                self.reader.check_finite(row)
            raise
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        self.spent += seconds
        if self.metrics is not None and self.bar is not None:
            step, tokens = self.steps[number - 1], self.tokens[number - 1]
            shape: DraftShape = self.trainer.draft.shape
            trained = self.trainer.draft.lm_head.weight.requires_grad
            flops = flops_of_step(shape, tokens, work.columns, work.losses, trained)
            device = self.trainer.draft.fc.weight.device.type
            use = device_use(device, flops / seconds / self.trainer.ranks.world)
            speed = {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1), **use}
            self.metrics.note({"step": number, "epoch": step.epoch, **found, "lr": lr, **speed})
            text = f"step {number}/{len(self.steps)} epoch {step.epoch} loss {found['loss']:.3f}"
            text += " acc " + " ".join(f"{a:.3f}" for a in found["accuracy_by_depth"])
            self.bar.add(tokens, text + "".join(f" {k} {v}" for k, v in use.items()))
        return sums.stop

    def note_epoch(self, number: int, heldout: dict[str, Any]) -> None:
        epoch = self.steps[number - 1].epoch
        if self.metrics is not None:
            self.metrics.note({"step": number, "epoch": epoch, **heldout})
            log(
                f"train: epoch {epoch} held-out accuracy {heldout['heldout_accuracy']}"
                f" acceptance length {heldout['acceptance_length']}"
            )

    def close(self) -> None:
        if self.metrics is not None and self.bar is not None:
            self.metrics.close()
            self.bar.close()


class HeldOut:
    """The held-out measure at the end of each epoch, and the weights of the best one.

    Args:
        reader: of rows whose loss follows the rule "answer": whatever the training's, a server
            accepts along paths inside answers.
        rows: of held-out samples; none, and nothing is measured.
        patience: epochs without a better one after which the draft is called stale.
    """

    def __init__(
        self,
        trainer: Trainer,
        teacher: step.Teacher,
        reader: RowReader,
        rows: list[list[int]],
        patience: int | None,
    ):
        self.trainer, self.teacher, self.reader, self.rows = trainer, teacher, reader, rows
        self.patience = patience
        self.best: dict[str, Any] | None = None  # its measure, step and epoch
        self.weights: dict[str, torch.Tensor] = {}  # of the best epoch, on the first rank
        self.measured = 0  # the last step measured after

    def measure(self, number: int, epoch: int) -> dict[str, Any] | None:
        """Measure the draft after a step; remember its weights if it is the best so far."""
        if not self.rows:
            return None
        found = measure(self.trainer, self.teacher, self.reader, self.rows)
        self.measured = number
        if self.best is None or found["acceptance_length"] > self.best["acceptance_length"]:
            self.best = {"step": number, "epoch": epoch, **found}
            self.keep()
        return found

    def keep(self) -> None:
        """Remember the weights of now as the best."""
        if self.trainer.ranks.first:
            self.weights = {}  # two copies would not fit every GPU
            dtype = self.trainer.products.dtype
            self.weights = {
                name: p.detach().to(dtype if p.dim() == 2 else p.dtype, copy=True)
                for name, p in self.trainer.draft.named_parameters()
            }

    def stale(self, epoch: int) -> bool:
        """Whether `patience` is at its end after this epoch."""
        return bool(self.patience and self.best and epoch - self.best["epoch"] >= self.patience)

    def counters(self) -> dict[str, Any]:
        """For the state; see restore."""
        return {"best": self.best, "measured": self.measured}

    def restore(self, counters: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Go on from a state, whose own weights are the best's unless it brings others."""
        self.best, self.measured = counters["best"], counters["measured"]
        if self.best is None:
            return
        if self.best["step"] == counters["step"]:
            self.keep()
        else:
            self.weights = weights
