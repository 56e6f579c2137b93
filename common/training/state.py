"""The state folder: everything that a killed training run needs to resume to the same bit.

state/step_<n>/weights.safetensors   float32 weights; those of the best epoch, where it is an
                                     earlier one, under `best/<parameter>`, as they are served
state/step_<n>/moments-<rank>.safetensors  a rank's part of the optimizer state, float32, under
                                     `<key>/<parameter>`; any number of ranks can resume from them
state/step_<n>/state.json            step, counters, and the files' xxh3_128

A folder has its final name only when all its files are complete.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.artifacts import fsync_folder, read_json, write_json
from common.errors import UserError, again
from common.progress import log
from common.tensor_files import file_checksum
from common.training.optimizers import optimizer_state, restore_optimizer_state
from common.training.step import Trainer

WEIGHTS = "weights.safetensors"
OPTIMIZER = "moments-{}.safetensors"


def save_state(
    folder: Path,
    step: int,
    trainer: Trainer,
    counters: dict[str, Any],
    best: dict[str, torch.Tensor],
    keep: int,
) -> None:
    """Write state/step_<step>, complete or not at all, then drop all but the newest `keep`.

    Args:
        counters: JSON values to come back from load_state.
        best: weights of the best epoch, by name; empty when they are the draft's own.
    """
    partial, ranks = folder / f".step_{step}.partial", trainer.ranks

    def write() -> None:
        write_files(partial, trainer, best)

    def commit() -> None:
        if ranks.first:
            checksums = {path.name: file_checksum(path) for path in partial.iterdir()}
            write_json(partial / "state.json", {"step": step, "checksums": checksums, **counters})
            commit_state(partial, folder / f"step_{step}", keep)

    for part in write, commit:  # no rank continues, or logs that it is saved, before it is
        error: Exception | None = None
        try:
            part()
        except (OSError, SafetensorError) as e:
            error = e
        if not ranks.all_ok(error is None):
            if ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"{folder}: cannot write the state of step {step} ({error or 'on another rank'});"
                f" free space, then {again()}"
            )


def write_files(partial: Path, trainer: Trainer, best: dict[str, torch.Tensor]) -> None:
    """Each rank's files of a state, into an empty folder that the first rank makes."""
    ranks = trainer.ranks

    def make_folder() -> None:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

    ranks.main_process_first(make_folder)
    if ranks.first:
        weights = {n: p.detach() for n, p in trainer.draft.named_parameters()}
        write_tensors(partial / WEIGHTS, weights | {f"best/{n}": p for n, p in best.items()})
    write_tensors(
        partial / OPTIMIZER.format(ranks.rank), optimizer_state(trainer.draft, trainer.optimizers)
    )


def commit_state(partial: Path, final: Path, keep: int) -> None:
    """Give a complete state its name, then drop all but the newest `keep`."""
    folder = final.parent
    fsync_folder(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    fsync_folder(folder)
    kept = sorted(complete_states(folder), key=step_of)[-keep:]
    for old in [*folder.glob(".step_*.partial"), *named_states(folder)]:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors of any device to a safetensors file that outlives a power cut."""
    save_file({k: v.contiguous() for k, v in tensors.items()}, path)
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def step_of(state: Path) -> int:
    return int(state.name.removeprefix("step_"))


def named_states(folder: Path) -> list[Path]:
    return [p for p in folder.glob("step_*") if p.name.removeprefix("step_").isdigit()]


def complete_states(folder: Path) -> list[Path]:
    return [p for p in named_states(folder) if (p / "state.json").is_file()]


def latest_state(folder: Path) -> Path | None:
    """The newest complete state, or None."""
    return max(complete_states(folder), key=step_of, default=None)


def check_state(folder: Path, steps: int) -> None:
    """UserError where the newest state is not as it was written, or not of a run of so many steps;
    logs folders that are no complete states."""
    for other in named_states(folder):
        if not (other / "state.json").is_file():
            log(f"train: note: {other} has no state.json; the next state replaces it")
    newest = latest_state(folder)
    if newest is None:
        return
    try:
        check_files(newest, steps)
    except (UserError, OSError) as e:
        raise UserError(
            f"{newest}: the state is damaged ({e}); delete that folder and {again()};"
            " it resumes from an older state or starts over"
        ) from None


def check_files(path: Path, steps: int) -> None:
    """See check_state."""
    found = read_json(path / "state.json")
    best, sums = found.get("best"), found.get("checksums")
    counters = [found.get("step"), found.get("measured")]
    if best is not None:
        counters += [best.get("step"), best.get("epoch")] if isinstance(best, dict) else [None]
    if not all(isinstance(x, int) and x >= 0 for x in counters):
        raise UserError("state.json lacks its counters")
    if found["step"] != step_of(path) or not 1 <= found["step"] <= steps:
        raise UserError(f"state.json is of step {found['step']}, of {steps}")
    numbers = [found.get("seconds")] + ([best.get("acceptance_length")] if best else [])
    if not all(isinstance(x, int | float) for x in numbers) or not isinstance(sums, dict):
        raise UserError("state.json lacks its seconds, checksums or acceptance length")
    names = [WEIGHTS, *(OPTIMIZER.format(rank) for rank in range(len(sums) - 1))]
    if sorted(sums) != sorted(names):
        raise UserError("state.json names other files")
    for name in names:
        if file_checksum(path / name) != sums[name]:
            raise UserError(f"{name} is not what was written")


def load_state(path: Path, trainer: Trainer) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Restore weights and optimizer state in place, of a state that check_state has passed; returns
    (state.json's content, `best` as saved, on the first rank)."""
    found = read_json(path / "state.json")
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
    parts = [path / name for name in sorted(found["checksums"]) if name != WEIGHTS]
    restore_optimizer_state(trainer.draft, trainer.optimizers, parts)
    trainer.linears.refresh()
    return found, best
