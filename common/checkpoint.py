"""The state folder: everything that a killed training run needs to go on to the same bit.

state/step_<n>/state.safetensors  float32 weights, and the optimizer's moments under
                                  `<moment>/<parameter>`
state/step_<n>/state.json         step, optimizer step, counters

A folder has its final name only when both files are whole.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from common.artifacts import fsync_folder, read_json, write_json
from common.cli import UserError
from common.verifier import safetensors_header


def save_state(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, extra: dict
) -> None:
    """Write state/step_<step> atomically, then drop the older ones."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}/{name}"] = value
    partial = folder / f".step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, partial / "state.safetensors")
        with open(partial / "state.safetensors", "rb") as f:
            os.fsync(f.fileno())
        write_json(partial / "state.json", {"step": step, **extra})
        final = folder / f"step_{step}"
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        fsync_folder(folder)
    except SafetensorError as e:  # an I/O error in safetensors' own words
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{folder}: cannot write the state of step {step} ({e}); free space, then run the same"
            " command again"
        ) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in folder.iterdir():
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def latest_state(folder: Path) -> Path | None:
    """The newest whole state, or None."""
    steps = {p: p.name.removeprefix("step_") for p in folder.glob("step_*")}
    whole = {p: int(n) for p, n in steps.items() if n.isdigit() and (p / "state.json").is_file()}
    return max(whole, key=lambda p: whole[p], default=None)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore weights and moments in place; returns state.json's content."""
    from safetensors.torch import load_file

    try:
        safetensors_header(path / "state.safetensors")
        found = read_json(path / "state.json")
        if not isinstance(found.get("step"), int) or not {"heldout", "seconds"} <= found.keys():
            raise UserError("state.json lacks its counters")
    except (UserError, OSError) as e:
        raise UserError(
            f"{path}: the state is damaged ({e}); delete that folder (training then starts over)"
            " and run the same command again"
        ) from None
    tensors = load_file(path / "state.safetensors")
    for name, parameter in model.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise UserError(
                f"{path}: is the state of another draft ({name} missing or of another shape);"
                " choose another --output-dir, or --overwrite"
            )
        with torch.no_grad():
            parameter.copy_(tensors[name])
        moments = {
            key.split("/", 1)[0]: value
            for key, value in tensors.items()
            if key.endswith(f"/{name}")
        }
        if moments:
            optimizer.state[parameter] = {
                # the step counter stays where AdamW keeps it; moments go to the parameter
                k: v.to(parameter.device) if v.dim() or parameter.is_cuda else v
                for k, v in moments.items()
            }
    return found
