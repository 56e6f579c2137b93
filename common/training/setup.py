"""What 04 trains with: the draft and its optimizers, as the newest state left them, and readers of
rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.draft.initial import initialize_from
from common.draft.linear_products import LinearProducts
from common.draft.model import Eagle3Draft, initialize
from common.draft.packed_row import PackedRow
from common.training.heldout import HeldOut, heldout_counts
from common.training.inputs import TrainJob
from common.training.loader import RowReader
from common.training.optimizers import make_optimizers
from common.training.ranks import Ranks
from common.training.state import latest_state, load_state
from common.training.step import Target, Trainer
from common.verifier.head import HEAD_FILE
from common.verifier.logits import read_head


@dataclass(frozen=True)
class Training:
    """What a run works with: `reader` of the training rows; `start_step` and `seconds`, the steps
    of earlier runs and their time."""

    trainer: Trainer
    reader: RowReader
    heldout: HeldOut
    start_step: int
    seconds: float


def set_up(job: TrainJob, ranks: Ranks) -> Training:
    """Build the draft and what trains it, and resume from the newest state."""
    settings, data = job.settings, job.data
    target, draft = build_draft(job)
    draft.lm_head.weight.requires_grad_(settings.train_lm_head)
    newest = None if settings.overwrite else latest_state(settings.out / "state")
    if settings.init_from and newest is None:
        taken = initialize_from(Path(settings.init_from), draft, target.token_D)
        ranks.log(f"train: starts from {settings.init_from}, with {taken} rows of its head")
    optimizers = make_optimizers(
        draft, settings.optimizer, settings.lr, settings.weight_decay, ranks.world
    )
    linears = LinearProducts(settings.dtype, settings.float8)
    trainer = Trainer(draft, target, linears, optimizers, settings.clip, ranks)
    depths, pin = settings.ttt_steps, settings.device == "cuda"
    reader, held_reader = (
        RowReader(data.hidden, data.samples, depths, rule, job.longest, pin)
        for rule in (settings.loss_rule, "answer")
    )
    heldout = HeldOut(trainer, held_reader, job.held_rows, settings.patience)
    if newest is None:
        return Training(trainer, reader, heldout, 0, 0.0)
    saved, best_weights = load_state(newest, trainer)
    heldout.restore(saved, best_weights)
    return Training(trainer, reader, heldout, saved["step"], saved["seconds"])


def build_draft(job: TrainJob) -> tuple[Target, Eagle3Draft]:
    """Return (target, fresh float32 draft) on the device."""
    device, dtype, d2t = job.settings.device, job.settings.dtype, job.data.d2t
    head = read_head(job.data.hidden.head_folder / HEAD_FILE, job.data.head.facts)
    token_D = torch.from_numpy(d2t + np.arange(len(d2t))).to(device)
    head_VH = head.head_VH.to(device)
    bias_V = None if head.bias_V is None else head.bias_V.to(device, dtype)
    target = Target(
        facts=head.facts,
        embed_VH=head.embed_VH.to(device, dtype),
        head_VH=head_VH.to(dtype),
        bias_V=bias_V,
        head_DH=head_VH[token_D].to(dtype),
        bias_D=None if bias_V is None else bias_V[token_D],
        norm_H=head.norm_H.to(device),
        token_D=token_D,
    )
    torch.manual_seed(job.settings.seed)
    with torch.device(device):
        draft = Eagle3Draft(job.shape)
    # a server scales none of a draft's logits
    initialize(draft, head_VH[token_D] * head.facts.logit_scale)
    return target, draft


def compile_warm_up(trainer: Trainer, row: PackedRow) -> None:
    """Run everything that compiles once, on a GPU, and forget it.

    Kernels are made for the sizes first seen. A run that resumes starts at another step, and would
    get others, with other last bits, if the first row were not always the same.
    """
    trainer.backward(row, [1.0] * len(row.tokens_KN))
    for parameter in trainer.draft.parameters():
        parameter.grad = None
    heldout_counts(trainer.draft, trainer.eval_linears, trainer.target, row)
    torch.cuda.synchronize()
