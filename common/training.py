"""The parts of 04's loop: what it is built of, one optimizer step, the held-out measure."""

import math
from dataclasses import replace

import numpy as np
import torch

from common import ttt_step
from common.cli import UserError
from common.draft_shape import DraftShape
from common.eagle3 import Eagle3Draft, PackedRow, initialize
from common.packing import RowReader
from common.verifier import Verifier, read_tensors


def build(
    verifier: Verifier,
    shape: DraftShape,
    d2t: np.ndarray,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> tuple[ttt_step.Teacher, Eagle3Draft]:
    """Return (teacher, fresh draft) on the device; of the verifier, three tensors are read.

    The draft's weights are float32 masters, the teacher's are in the compute dtype.
    """
    tensors = read_tensors(verifier, ("embed_tokens", "lm_head", "norm"))
    target_D = torch.from_numpy(d2t) + torch.arange(len(d2t))
    head_VH = tensors["lm_head"]
    teacher = ttt_step.Teacher(
        embed_VH=tensors["embed_tokens"].to(device, dtype),
        head_VH=head_VH.to(device, dtype),
        head_DH=head_VH[target_D].to(device, dtype),
        norm_H=tensors["norm"].to(device, torch.float32),
        eps=verifier.rms_norm_eps,
        target_D=target_D.to(device),
    )
    torch.manual_seed(seed)
    draft = Eagle3Draft(shape)
    initialize(draft, head_VH[target_D])
    return teacher, draft.to(device)


def train_step(
    draft: Eagle3Draft,
    teacher: ttt_step.Teacher,
    row: PackedRow,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip: float,
    depth_weights: list[float],
    device: str,
    dtype: torch.dtype,
) -> dict:
    """One optimizer step on a packed row; returns what metrics.jsonl notes of it.

    UserError, before the weights are touched, when the loss or its gradient is not finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        result = ttt_step.step_loss(draft, teacher, row, depth_weights, dtype)
    optimizer.zero_grad()
    result.loss.backward()
    trained = [p for p in draft.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, clip)
    loss = float(result.loss.detach())
    if not math.isfinite(loss) or not math.isfinite(float(norm)):
        raise UserError(
            f"the loss is {loss} and its gradient's norm {float(norm)}; no step was taken. Lower"
            " --lr and start again with --overwrite"
        )
    optimizer.step()
    counts = result.counts
    return {
        "loss": round(loss, 5),
        "loss_by_depth": [
            round(float(s) / n, 5) for s, n in zip(result.loss_sums, counts, strict=True)
        ],
        "accuracy_by_depth": [
            round(int(c) / n, 4) for c, n in zip(result.correct, counts, strict=True)
        ],
        "lr": lr,
        "grad_norm": round(float(norm), 4),
        "loss_rows": counts,
    }


def measure(
    draft: Eagle3Draft,
    teacher: ttt_step.Teacher,
    reader: RowReader,
    rows: list[list[int]],
    device: str,
    dtype: torch.dtype,
) -> dict:
    """Held-out accuracy a depth and the acceptance length they imply."""
    counts = torch.zeros(reader.depths, 4, dtype=torch.int64)
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for indices in rows:
            row = to_device(reader.read(indices), device)
            counts += ttt_step.heldout_counts(draft, teacher, row, dtype)
    found = ttt_step.acceptance(counts)
    return {"heldout_accuracy": found.pop("accuracy"), **found}


def to_device(row: PackedRow, device: str) -> PackedRow:
    """The row with its tensors on the device; the loss table and columns stay on the CPU."""
    if device == "cpu":
        return row
    moved = {
        name: getattr(row, name).pin_memory().to(device, non_blocking=True)
        for name in ("aux_TAH", "last_TH", "ids_T", "positions_T")
    }
    return replace(row, **moved)


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak learning rate: linear warm-up, then a cosine to 0."""
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
