"""What a training run notes as it goes, in metrics.jsonl and on the log, and the picture of it."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from common.artifacts import atomic_file, decode_json, writing
from common.draft.config import flops_of_step
from common.progress import Progress, log
from common.training.packing import StepWork
from common.training.setup import Training, TrainJob
from common.training.step import StepSums

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


class StepLog:
    """Notes each step when its sums are there: on a GPU a step later, so that it never waits.

    Only the first rank prints and writes; `seconds` sums the time of all steps of all runs.
    """

    def __init__(self, job: TrainJob, training: Training):
        self.job, self.trainer = job, training.trainer
        self.seconds = training.seconds
        self._launched: tuple[int, StepSums, StepWork, float] | None = None
        self.metrics = self.bar = None
        if self.trainer.ranks.first:
            settings, start = job.settings, training.start_step
            measured = training.heldout.measured
            self.metrics = Metrics(settings.out, start, measured, settings.tensorboard)
            tokens = [step.tokens for step in job.steps]
            self.bar = Progress("train", sum(tokens), "tokens", initial=sum(tokens[:start]))
        self.restart_clock()

    def restart_clock(self) -> None:
        """The next step's time counts from now."""
        self._last = time.monotonic()

    def add(self, number: int, sums: StepSums, work: StepWork, lr: float) -> bool:
        """Take a launched step, numbered from 1, and note the one before; returns whether to
        stop."""
        stop = self.finish_step()
        self._launched = (number, sums, work, lr)
        return stop if sums.copied is not None else self.finish_step()

    def finish_step(self) -> bool:
        """Wait for the step launched last, and note it; returns whether any rank got a signal to
        stop before it. UserError where its loss or gradient is not finite."""
        if self._launched is None:
            return False
        number, sums, work, lr = self._launched
        self._launched = None
        found = sums.metrics(number, work.losses)
        seconds, self._last = time.monotonic() - self._last, time.monotonic()
        self.seconds += seconds
        self.note_step(number, found, work, lr, seconds)
        return sums.stop

    def note_step(
        self, number: int, found: dict[str, Any], work: StepWork, lr: float, seconds: float
    ) -> None:
        """One step's line in metrics.jsonl and on the log."""
        if self.metrics is None or self.bar is None:
            return
        step, settings = self.job.steps[number - 1], self.job.settings
        flops = flops_of_step(
            self.job.shape, step.tokens, work.queries, work.losses, settings.train_lm_head
        )
        use = device_use(settings.device, flops / seconds / self.trainer.ranks.world)
        speed = {"tokens": step.tokens, "tokens_per_second": round(step.tokens / seconds, 1), **use}
        self.metrics.note({"step": number, "epoch": step.epoch, **found, "lr": lr, **speed})
        text = f"step {number}/{len(self.job.steps)} epoch {step.epoch} loss {found['loss']:.3f}"
        text += " acc " + " ".join(f"{a:.3f}" for a in found["accuracy_by_depth"])
        self.bar.add(step.tokens, text + "".join(f" {k} {v}" for k, v in use.items()))

    def note_epoch(self, number: int, epoch: int, heldout: dict[str, Any]) -> None:
        """The held-out measure after step `number`."""
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


class Metrics:
    """metrics.jsonl, a line per step and one per epoch, and TensorBoard's files with --tensorboard.

    Args:
        step, measured: lines of later steps, and of later measures, are dropped: they are about to
            be done again.
    """

    def __init__(self, out: Path, step: int, measured: int, tensorboard: bool):
        self._path = out / "metrics.jsonl"
        keep_metrics(self._path, step, measured)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def note(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._board is None:
            return
        for name, value in line.items():
            if isinstance(value, list):
                for k, x in enumerate(value):
                    self._board.add_scalar(f"{name}/{k}", x, line["step"])
            else:
                self._board.add_scalar(name, value, line["step"])
        self._board.flush()  # a run may end at any moment

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def keep_metrics(path: Path, step: int, measured: int) -> None:
    """Drop the lines of later steps, of measures after `measured`, and those that are damaged."""
    if not path.exists():
        return
    kept, damaged = [], 0
    for line in path.read_bytes().splitlines():
        try:
            found = decode_json(line)
            if found["step"] <= (step if "loss" in found else min(step, measured)):
                kept.append(line + b"\n")
        except (ValueError, TypeError, KeyError):
            damaged += 1  # the line that a kill cut, or a fault of the disk
    if damaged:
        log(f"train: note: {path}: unreadable lines are dropped: {damaged}")
    with atomic_file(path) as f:
        f.writelines(kept)


def draw_curves(out: Path) -> None:
    """curves.png: loss and accuracy per depth over the steps, held-out accuracy at epoch ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [x for x in lines if "loss" in x]
    held = [x for x in lines if "heldout_accuracy" in x]
    if not steps:  # metrics.jsonl was lost; the weights were not
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for k in range(max(len(x["loss_by_depth"]) for x in steps)):  # a short row has no deep loss
        here = [x for x in steps if len(x["loss_by_depth"]) > k]
        x = [p["step"] for p in here]
        left.plot(x, [p["loss_by_depth"][k] for p in here], color=f"C{k}", label=f"depth {k}")
        right.plot(x, [p["accuracy_by_depth"][k] for p in here], color=f"C{k}", alpha=0.4)
        if held:
            right.plot(
                [p["step"] for p in held],
                [p["heldout_accuracy"][k] for p in held],
                color=f"C{k}",
                marker="o",
                label=f"depth {k}, held out",
            )
    left.set(xlabel="step", ylabel="KL(verifier || draft)", title="loss")
    right.set(xlabel="step", ylabel="accuracy", title="accuracy: training (pale), held out")
    left.legend()
    if held:
        right.legend()
    figure.tight_layout()
    with atomic_file(out / "curves.png") as f:
        figure.savefig(f, format="png", dpi=110)
    pyplot.close(figure)
