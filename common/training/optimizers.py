"""The optimizers of a draft, and their state by parameter name."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
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

    def make(kind: Any, parameters: list[Any], **options: Any) -> torch.optim.Optimizer:
        options |= {"lr": lr, "weight_decay": weight_decay}
        if world == 1:
            return kind(parameters, **options)
        return ZeroRedundancyOptimizer(parameters, kind, **options)

    # lists: every rank must see the same order
    trained = [(n, p) for n, p in draft.named_parameters() if p.requires_grad]
    gains = [p for _, p in trained if p.dim() == 1]
    matrices = [p for _, p in trained if p.dim() == 2]
    head = [p for n, p in trained if n == "lm_head.weight"]
    made = []
    if name == "muon":
        hidden = [p for n, p in trained if p.dim() == 2 and n != "lm_head.weight"]
        made = [make(torch.optim.Muon, hidden, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")]
        matrices = head
    groups: list[dict[str, Any]] = [{"params": matrices}] if matrices else []
    groups.append({"params": gains, "weight_decay": 0.0})
    return [*made, make(torch.optim.AdamW, groups, betas=BETAS, fused=True)]


def own_parts(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers that hold this rank's state."""
    return [o.optim if isinstance(o, ZeroRedundancyOptimizer) else o for o in optimizers]


def optimizer_state(
    draft: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """This rank's part of the optimizers' state: `<key>/<parameter>` → tensor."""
    names: dict[torch.Tensor, str] = {p: n for n, p in draft.named_parameters()}
    return {
        f"{key}/{names[parameter]}": value
        for optimizer in own_parts(optimizers)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer_state(
    draft: nn.Module, optimizers: list[torch.optim.Optimizer], files: list[Path]
) -> None:
    """Put a saved state, from the files of all ranks that wrote it, into the optimizers; each
    rank reads what it owns."""
    names: dict[torch.Tensor, str] = {p: n for n, p in draft.named_parameters()}
    owned = {
        names[p]: (optimizer, p)
        for optimizer in own_parts(optimizers)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for file in files:
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118
                key, parameter_name = name.split("/", 1)
                if parameter_name in owned:
                    optimizer, parameter = owned[parameter_name]
                    # AdamW keeps its step counter on the CPU beside a CPU's parameters
                    optimizer.state[parameter][key] = f.get_tensor(name).to(parameter.device)
