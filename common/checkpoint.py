"""The state folder: everything that a killed training run needs to go on to the same bit.

state/step_<n>/weights.safetensors   float32 weights; those of the best epoch, where it is an
                                     earlier one, under `best/<parameter>`, as they are served
state/step_<n>/moments-<rank>.safetensors  a rank's part of the optimizer's state, float32, under
                                     `<moment>/<parameter>`; any number of ranks can go on
state/step_<n>/state.json            step, counters, number of parts

A folder has its final name only when all files are whole.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from common.artifacts import fsync_folder, read_json, write_json
from common.cli import UserError
from common.optimizers import moments, restore_moments
from common.training import Trainer
from common.verifier import safetensors_header

WEIGHTS = "weights.safetensors"
MOMENTS = "moments-{}.safetensors"


def save_state(
    folder: Path,
    step: int,
    trainer: Trainer,
    counters: dict[str, Any],
    best: dict[str, torch.Tensor],
    keep: int,
) -> None:
    """Write state/step_<step>, whole or not at all, then drop all but the newest `keep`.

    Args:
        counters: JSON values to come back from load_state.
        best: weights of the best epoch, by name; empty when they are the draft's own.
    """
    partial, ranks = folder / f".step_{step}.partial", trainer.ranks

    def make() -> None:
        if ranks.first:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()

    error: Exception | None = None
    try:
        ranks.in_turn(make)
        if ranks.first:
            weights = {n: p.detach() for n, p in trainer.draft.named_parameters()}
            weights |= {f"best/{n}": p for n, p in best.items()}
            write_tensors(partial / WEIGHTS, weights)
        write_tensors(
            partial / MOMENTS.format(ranks.rank), moments(trainer.draft, trainer.optimizers)
        )
    except (OSError, SafetensorError) as e:
        error = e
    if not ranks.agree(error is None):
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot write the state of step {step} ({error or 'on another rank'}); free"
            " space, then run the same command again"
        )
    if not ranks.first:
        return
    write_json(partial / "state.json", {"step": step, "parts": ranks.world, **counters})
    fsync_folder(partial)
    final = folder / f"step_{step}"
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    fsync_folder(folder)
    kept = sorted(whole_states(folder), key=step_of)[-keep:]
    for old in folder.iterdir():
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors of any device to a safetensors file that outlives a power cut."""
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def step_of(state: Path) -> int:
    return int(state.name.removeprefix("step_"))


def whole_states(folder: Path) -> list[Path]:
    named = [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return [p for p in named if (p / "state.json").is_file()]


def latest_state(folder: Path) -> Path | None:
    """The newest whole state, or None."""
    return max(whole_states(folder), key=step_of, default=None)


def load_state(path: Path, trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Restore weights and moments in place; returns (state.json's content, `best` as saved, on the
    first rank)."""
    from safetensors import safe_open

    try:
        found = read_json(path / "state.json")
        if not isinstance(found.get("step"), int) or not isinstance(found.get("parts"), int):
            raise UserError("state.json lacks its counters")
        parts = [path / MOMENTS.format(rank) for rank in range(found["parts"])]
        for file in [path / WEIGHTS, *parts]:
            safetensors_header(file)
    except (UserError, OSError) as e:
        raise UserError(
            f"{path}: the state is damaged ({e}); delete that folder and run the same command"
            " again, which goes on from an older state or starts over"
        ) from None
    best = {}
    with safe_open(path / WEIGHTS, framework="pt") as f, torch.no_grad():
        sizes = {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118
        for name, parameter in trainer.draft.named_parameters():
            if sizes.get(name) != tuple(parameter.shape):
                raise UserError(
                    f"{path}: is the state of another draft ({name} missing or of another shape);"
                    " choose another --output-dir, or --overwrite"
                )
            parameter.copy_(f.get_tensor(name))
            if trainer.ranks.first and f"best/{name}" in sizes:
                # a copy: the file is mapped, and is deleted when a later state is there
                best[name] = f.get_tensor(f"best/{name}").clone()
    restore_moments(trainer.draft, trainer.optimizers, parts)
    trainer.products.refresh()
    return found, best
