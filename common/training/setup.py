"""What 04 trains, once everything is checked, and what it trains it with."""

from dataclasses import dataclass
from pathlib import Path

import torch

from common.draft.checkpoint import initialize_from
from common.draft.config import DraftShape
from common.draft.linear_products import Products
from common.manifest import Output
from common.progress import log
from common.training import optimizers, packing
from common.training.inputs import Data
from common.training.loader import RowReader
from common.training.packing import Step
from common.training.ranks import Ranks
from common.training.state import latest_state, load_state
from common.training.step import Teacher
from common.training.step_log import HeldOut
from common.training.trainer import Trainer, build
from common.verifier.config import Verifier


@dataclass(frozen=True)
class Job:
    """What a run trains, once everything is checked."""

    output: Output
    model: Verifier
    shape: DraftShape
    data: Data
    train: dict[int, int]  # index → tokens
    held: dict[int, int]
    steps: list[Step]

    def step_tokens(self, step: Step) -> int:
        return sum(self.train[i] for row in step.rows for i in row)


@dataclass(frozen=True)
class Loaded:
    """What a run works with: `reader` of the training rows, `held` the held-out measure; `begun`
    and `spent`, the steps of earlier runs and their seconds."""

    trainer: Trainer
    teacher: Teacher
    reader: RowReader
    held: HeldOut
    begun: int
    spent: float


def load(args, job: Job, device: str, dtype: torch.dtype, ranks: Ranks) -> Loaded:
    """Build the draft and what trains it, and go on from the newest state."""
    data = job.data
    teacher, draft = build(job.model, job.shape, data.maps[0], device, dtype, args.seed)
    draft.lm_head.weight.requires_grad_(args.train_lm_head)
    states = Path(args.output_dir) / "state"
    newest = None if args.overwrite else latest_state(states)
    if args.init_from and newest is None:
        taken = initialize_from(Path(args.init_from), draft, teacher.target_D)
        if ranks.first:
            log(f"train: starts from {args.init_from}, with {taken} rows of its head")
    optim = optimizers.make_optimizers(
        draft, args.optimizer, args.lr, args.weight_decay, ranks.world
    )
    products = Products(dtype, args.float8)
    trainer = Trainer(draft, products, optim, args.clip, ranks)
    held_rows = packing.pack_rows(job.held, args.max_batch_tokens, None)
    lengths = job.train | job.held
    rows_of_all = [row for step in job.steps for row in step.rows] + held_rows
    longest = max(sum(lengths[i] for i in row) for row in rows_of_all)
    reader, held_reader = (
        RowReader(data.hidden, data.samples, args.ttt_steps, rule, longest, device == "cuda")
        for rule in (args.loss_rule, "answer")
    )
    held = HeldOut(trainer, teacher, held_reader, held_rows, args.patience)
    begun, spent = 0, 0.0
    if newest is not None:
        saved, best_weights = load_state(newest, trainer)
        held.restore(saved, best_weights)
        begun, spent = saved["step"], saved["seconds"]
    return Loaded(trainer, teacher, reader, held, begun, spent)
