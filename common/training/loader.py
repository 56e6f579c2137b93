"""Reading packed rows from 03's files, ahead of the step that trains on them.

Files are read straight into the row's place in a host buffer, by several threads at once; a
buffer beside a GPU is page-locked and copied on a stream of its own. The memory is
bounded: READ_AHEAD rows on the host, and on the GPU those beside the one in use and the one
before. The held-out measure reads rows of its own, while the training's wait.
"""

import functools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch

from common.data.samples import Sample
from common.draft.packed_row import PackedRow, filled_size, make_row, tensors_of
from common.errors import UserError
from common.states.folder import HiddenFolder
from common.states.values import PIECE, all_finite, row_problem, states_problem
from common.tensor_files import read_header

READ_AHEAD = 2
THREADS = max(2, min(8, (os.cpu_count() or 4) // 2))


@dataclass(frozen=True)
class Buffer:
    """Room for one row: states_TLH, scale_TL of float8 states, page-locked beside a GPU."""

    states_TLH: torch.Tensor
    scale_TL: torch.Tensor | None


class RowReader:
    """Reads rows of samples from a hidden-states folder.

    Args:
        tokens: of the longest row; every row is filled up to it (and to a multiple of FILL)
            with zeros that carry no loss.
    """

    def __init__(
        self,
        hidden: HiddenFolder,
        samples: dict[int, Sample],
        depths: int,
        rule: str,
        tokens: int,
        pin: bool,
    ):
        self.hidden, self.samples, self.depths, self.rule = hidden, samples, depths, rule
        self.tokens = filled_size(tokens)
        self.pin = pin
        self._files = ThreadPoolExecutor(THREADS, "read")

    def buffer(self) -> Buffer:
        """Room for one row of this reader's length, in the files' dtype."""
        form = self.hidden.form
        shape = (self.tokens, form.layers, form.hidden_size)
        states = torch.zeros(shape, dtype=getattr(torch, form.dtype), pin_memory=self.pin)
        scale = torch.zeros(shape[:2], pin_memory=self.pin) if states.itemsize == 1 else None
        return Buffer(states, scale)

    def read(self, indices: list[int], into: Buffer | None = None) -> PackedRow:
        """Read samples into a row on the CPU, whose states lie in the buffer."""
        buffer = into or self.buffer()
        ids = [torch.from_numpy(self.samples[i].input_ids).long() for i in indices]
        masks = [torch.from_numpy(self.samples[i].loss_mask) for i in indices]
        lengths = [len(x) for x in ids]
        reads, at = [], 0
        for index, length in zip(indices, lengths, strict=True):
            reads.append(self._files.submit(self._read_sample, index, buffer, at, at + length))
            at += length
        rest = self.tokens - at
        if rest < 0:
            raise ValueError(f"samples of {at} tokens in a row of {self.tokens}")
        if rest:
            buffer.states_TLH[at:].zero_()
            ids.append(torch.zeros(rest, dtype=torch.int64))
            masks.append(torch.zeros(rest, dtype=torch.bool))
            lengths.append(rest)
        row = make_row(
            buffer.states_TLH,
            buffer.scale_TL,
            torch.cat(ids),
            torch.cat(masks),
            lengths,
            self.depths,
            self.rule,
        )
        for one in reads:
            one.result()
        return row

    def _read_sample(self, index: int, buffer: Buffer, start: int, end: int) -> None:
        """Read one sample's file into its place; UserError unless it is the sample's, with states
        that can be trained on."""
        path, form = self.hidden.file(index), self.hidden.form
        header = read_header(path)
        ids = torch.empty(end - start, dtype=torch.int64)
        states = bytes_of(buffer.states_TLH[start:end])
        scale_TL = None if buffer.scale_TL is None else buffer.scale_TL[start:end]
        finite = True
        with open(path, "rb", buffering=0) as f:
            read_into(f, header["token_ids"].begin, bytes_of(ids), path)
            if scale_TL is not None:
                read_into(f, header["hidden_states_scale"].begin, bytes_of(scale_TL), path)
            for at in range(0, len(states), PIECE):  # looked at while it is in the cache
                piece = states[at : at + PIECE]
                read_into(f, header["hidden_states"].begin + at, piece, path)
                finite = finite and all_finite(piece, form.dtype)
        problem = None
        if not torch.equal(ids, torch.from_numpy(self.samples[index].input_ids).long()):
            problem = "its token_ids are not the sample's"
        else:
            check = row_problem if finite else states_problem
            scales = None if scale_TL is None else scale_TL.numpy()
            problem = check(states, scales, form, self.hidden.layers)
        if problem:
            raise UserError(f"{path}: {problem}; delete it and run 03 again")


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor's own memory, uint8."""
    return tensor.view(torch.uint8).numpy().reshape(-1)


def read_into(f: FileIO, begin: int, data: np.ndarray, path: Path) -> None:
    """Fill an array of bytes from an open file."""
    f.seek(begin)
    left = data.data
    while left:
        count = f.readinto(left)
        if not count:
            raise UserError(f"{path}: ends early; delete it and run 03 again")
        left = left[count:]


def rows_ahead(reader: RowReader, rows: list[list[int]], device: str) -> Iterator[PackedRow]:
    """The rows of these samples, in order, on the device.

    On a GPU the next READ_AHEAD are read and copied while one trains. On a CPU, where a
    second thread would fight the step for the cores, each is read when it is needed, in
    the place of the one before.
    """
    if device == "cpu":
        buffer = reader.buffer()
        for indices in rows:
            yield reader.read(indices, buffer)
        return
    buffers = [(reader.buffer(), torch.cuda.Event()) for _ in range(READ_AHEAD)]
    used = [torch.cuda.Event() for _ in range(READ_AHEAD + 1)]

    def read(n: int) -> PackedRow:
        buffer, copied = buffers[n % READ_AHEAD]
        copied.synchronize()
        if n > READ_AHEAD:  # the step that is launched last may not run far ahead of the GPU
            used[n % len(used)].synchronize()
        row = reader.read(rows[n], buffer)
        with torch.cuda.stream(copying()):
            row = row.to(device)
            copied.record()
        return row

    # the current device is a thread's own
    pool = ThreadPoolExecutor(1, "row", torch.cuda.set_device, (torch.cuda.current_device(),))
    with pool:
        ahead = deque(pool.submit(read, n) for n in range(min(READ_AHEAD, len(rows))))
        for n in range(len(rows)):
            row = ahead.popleft().result()
            here = torch.cuda.current_stream()
            here.wait_event(buffers[n % READ_AHEAD][1])
            for tensor in tensors_of(row):  # their memory is the copying stream's
                tensor.record_stream(here)
            if n + READ_AHEAD < len(rows):
                ahead.append(pool.submit(read, n + READ_AHEAD))
            yield row
            used[n % len(used)].record()


@functools.cache
def copying() -> torch.cuda.Stream:
    """The stream of the copies: one, for the allocator keeps memory apart for each."""
    return torch.cuda.Stream()
