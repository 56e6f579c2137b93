"""The optimizers of a draft, and their state by parameter name."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

BETAS = (0.9, 0.95)
MOMENTUM = 0.95  # of Muon; as speculators' default


def make_optimizers(
    draft: nn.Module, name: str, lr: float, weight_decay: float, world: int
) -> list[torch.optim.Optimizer]:
    """Optimizers of the draft's trained parameters.

    Args:
        name: adamw; or muon, for the matrices but the head (whose rows are embeddings), with
            AdamW for the rest. Muon's updates are scaled to AdamW's size, so `lr` means the same.
        weight_decay: of the matrices; the norms' gains do not decay.
        world: with several ranks, each keeps and steps a part of the parameters (ZeRO-1).
    """
    trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
    # lists: every rank must see the same order
    hidden = [n for n, p in trained.items() if p.dim() == 2 and n != "lm_head.weight"]
    adamw: dict[str, Any] = {"betas": BETAS, "weight_decay": weight_decay, "fused": True}
    muon: dict[str, Any] = {
        "momentum": MOMENTUM,
        "weight_decay": weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    ours = [] if name == "adamw" else hidden
    rest = [p for n, p in trained.items() if n not in ours]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() == 2]},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    parts: list[tuple[Any, list[Any], dict[str, Any]]] = []
    if ours:
        parts = [(torch.optim.Muon, [trained[n] for n in ours], muon)]
    parts += [(torch.optim.AdamW, [g for g in groups if g["params"]], adamw)]
    if world == 1:
        return [kind(parameters, lr=lr, **options) for kind, parameters, options in parts]
    return [
        ZeroRedundancyOptimizer(parameters, kind, lr=lr, **options)
        for kind, parameters, options in parts
    ]


def own_parts(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that hold this rank's state."""
    return [o.optim if isinstance(o, ZeroRedundancyOptimizer) else o for o in optimizers]


def moments(draft: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """This rank's optimizer state: `<moment>/<parameter>` → tensor."""
    names: dict[torch.Tensor, str] = {p: n for n, p in draft.named_parameters()}
    return {
        f"{moment}/{names[parameter]}": value
        for optimizer in own_parts(optimizers)
        for parameter, state in optimizer.state.items()
        for moment, value in state.items()
    }


def restore_moments(
    draft: nn.Module, optimizers: list[torch.optim.Optimizer], files: list[Path]
) -> None:
    """Put a saved state, from the files of all ranks that wrote it, into the optimizers; each
    rank reads what it owns."""
    from safetensors import safe_open

    names: dict[torch.Tensor, str] = {p: n for n, p in draft.named_parameters()}
    owned = {
        names[p]: (optimizer, p)
        for optimizer in own_parts(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for file in files:
        with safe_open(file, framework="pt") as f:
            for key in f.keys():  # noqa: SIM118
                moment, name = key.split("/", 1)
                if name not in owned:
                    continue
                optimizer, parameter = owned[name]
                value = f.get_tensor(key)
                # AdamW keeps its step counter on the CPU beside a CPU's parameters
                optimizer.state[parameter][moment] = value.to(parameter.device)
