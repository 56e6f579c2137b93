"""What a run of 04 takes of disk and memory, and whether that is there."""

import os
from dataclasses import dataclass

import torch

from common import artifacts
from common.draft.activations import Activations, RowSize, activations
from common.draft.config import parameter_count, training_memory
from common.draft.export import speculators_draft
from common.draft.packed_row import filled_size
from common.errors import UserError
from common.host_memory import available_memory
from common.training.inputs import TrainJob
from common.training.ranks import Ranks

GB = 1e9
# Of a CPU's memory, beside the tensors that are there at once: what the allocator keeps of those
# that were, as a factor, and the libraries' own buffers. As measured, see benchmarks/RESULTS.md.
ALLOCATOR, LIBRARIES = 1.25, 300_000_000


def check_resources(job: TrainJob, ranks: Ranks) -> None:
    """UserError where the disk, the memory or the checkpoint's format will not do."""
    settings, itemsize = job.settings, job.settings.dtype.itemsize
    # the states kept, one more (it is complete before the oldest goes), and the checkpoint
    size = parameter_count(job.shape)
    disk = size * ((settings.keep_states + 1) * (12 + itemsize) + 4)
    optimizer_tensors = 1 if settings.optimizer == "muon" else 2
    memory = training_memory(
        job.shape, itemsize, ranks.world, optimizer_tensors, settings.train_lm_head
    )
    ranks.log(f"train: {size / 1e6:.1f} M parameters; up to {disk / GB:.2f} GB of disk")
    check_memory = check_gpu_memory if settings.device == "cuda" else check_cpu_memory
    check_memory(job, ranks, memory)
    there = () if settings.overwrite else settings.out.rglob("*.safetensors")
    disk -= sum(p.stat().st_size for p in there)
    artifacts.require_space(settings.out, disk, settings.overwrite, "lower --keep-states")
    if ranks.first:  # last, for it takes seconds
        aux, depths = job.data.layers[:-1], settings.ttt_steps
        speculators_draft(job.shape, job.data.verifier, aux, depths, settings.dtype)


def check_gpu_memory(job: TrainJob, ranks: Ranks, memory: int) -> None:
    """UserError where the GPU lacks the bytes that weights, gradients and optimizer state take."""
    ranks.log(f"train: at least {memory / GB:.2f} GB of GPU memory and the activations")
    free, _ = torch.cuda.mem_get_info()
    if memory > free:
        raise UserError(
            f"needs {memory / GB:.1f} GB of GPU memory and the activations', and"
            f" {free / GB:.1f} GB are free; free it, take a larger GPU, or more of them by"
            " torchrun, which share the optimizer's state"
        )


def check_cpu_memory(job: TrainJob, ranks: Ranks, memory: int) -> None:
    """UserError where the machine lacks the bytes of the largest row's activations beside weights,
    gradients and optimizer state."""
    filled = filled_size(job.longest)
    row = largest_row(job, filled)
    # rows are read into a buffer, held-out ones into another
    buffers = (1 + bool(job.held)) * filled * job.data.hidden.form.bytes_per_token
    memory += row.needs.total + buffers + LIBRARIES
    ranks.log(
        f"train: about {memory / GB:.2f} GB of memory; of it attention"
        f" {row.needs.attention / GB:.2f} GB and other activations {row.needs.others / GB:.2f} GB"
        f" at {row.tokens} tokens, {job.settings.ttt_steps} depths"
    )
    check_available(memory, row)


@dataclass(frozen=True)
class LargestRow:
    """The training row whose activations are largest."""

    samples: int
    tokens: int
    needs: Activations


def largest_row(job: TrainJob, filled: int) -> LargestRow:
    """Of rows that are all filled up to `filled` tokens; a sample's query positions are taken to be
    as many as its answers' tokens."""
    settings, samples = job.settings, job.data.samples
    sizes = {i: (int(samples[i].loss_mask.sum()), n) for i, n in job.train.items()}

    def needs(row: list[int]) -> LargestRow:
        size = RowSize(filled, [sizes[i] for i in row])
        head = settings.train_lm_head
        found = activations(job.shape, settings.dtype.itemsize, size, settings.ttt_steps, head)
        found = Activations(round(found.attention * ALLOCATOR), round(found.others * ALLOCATOR))
        return LargestRow(len(row), sum(n for _, n in size.samples), found)

    return max((needs(row) for row in job.rows), key=lambda one: one.needs.total)


def check_available(needed: int, row: LargestRow) -> None:
    """UserError where this machine's processes of torchrun, or the only one, do not find the bytes
    that each needs."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = available_memory()
    if needed * processes <= available:
        return
    shorter = (
        "--max-batch-tokens" if row.samples > 1 else "01's --max-seq-len, for shorter samples,"
    )
    each = f" for each of {processes} processes" if processes > 1 else ""
    raise UserError(
        f"needs about {needed / GB:.1f} GB of memory{each} and {available / GB:.1f} GB are"
        f" available; lower {shorter} or --ttt-steps, or free memory"
    )
