"""metrics.jsonl of a training run, and the picture drawn from it."""

import json
from pathlib import Path
from typing import Any

from common.artifacts import atomic_file


class Metrics:
    """metrics.jsonl, a line a step and one an epoch, and what TensorBoard reads if asked for.

    Args:
        step, measured: lines of later steps, and of later measures, are dropped: they are about to
            be done again.
    """

    def __init__(self, out: Path, step: int, measured: int, tensorboard: bool):
        keep_metrics(out / "metrics.jsonl", step, measured)
        self._file = open(out / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(out / "tensorboard", purge_step=step + 1)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def note(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in line.items():
            for k, x in enumerate(value) if isinstance(value, list) else [("", value)]:
                self._board.add_scalar(f"{name}/{k}" if k != "" else name, x, line["step"])
        self._board.flush()  # a run may end at any moment


def keep_metrics(path: Path, step: int, measured: int) -> None:
    """Drop the lines of later steps, and of measures after `measured`."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
            if found["step"] <= (step if "loss" in found else min(step, measured)):
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):  # the line that a kill cut
            break
    with atomic_file(path, "w") as f:
        f.writelines(kept)


def draw_curves(out: Path) -> None:
    """curves.png: loss and accuracy a depth over the steps, held-out accuracy at epoch ends."""
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
