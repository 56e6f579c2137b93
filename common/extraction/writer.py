"""Rows of forward passes on the host, and the threads that write them to files.

HOST_BUFFERS of max_tokens x layers x hidden (pinned memory beside a GPU) hold the rows of finished
batches. Writers run beside the following batches; the buffers bound how far they may fall behind,
and with it the memory.
"""

import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from common.errors import one_line
from common.extraction.batching import HOST_BUFFERS
from common.states.files import (
    FP8,
    LEAST_SCALE,
    StatesFormat,
    file_header,
    hidden_file,
    write_parts,
)
from common.states.values import all_alike, states_problem

# One thread hashes and writes 1 to 2 GB/s; Kimi-K2.5's states come at several.
WRITERS = max(2, min(12, (os.cpu_count() or 4) // 2))


class CaptureError(RuntimeError):
    """The captured rows are not what was submitted, or the layers could not be found."""


@dataclass
class CaptureBuffer:
    """Buffers for the residual stream of one forward pass of up to N tokens, on one device."""

    states_NLH: torch.Tensor
    scale_NL: torch.Tensor  # float32, of float8 states
    largest_NL: torch.Tensor  # float32, largest |value| of a row as the verifier computed it
    ids_N: torch.Tensor  # int64
    positions_N: torch.Tensor  # int64

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: str, device: torch.device, pin: bool):
        """Buffers for states of `shape` (tokens, layers, hidden)."""

        def allocate(size: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=kind, device=device, pin_memory=pin)

        n, layers, _ = shape
        return cls(
            allocate(shape, getattr(torch, dtype)),
            allocate((n, layers), torch.float32),
            allocate((n, layers), torch.float32),
            allocate((n,), torch.int64),
            allocate((n,), torch.int64),
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.states_NLH, self.scale_NL, self.largest_NL, self.ids_N, self.positions_N


@dataclass(frozen=True)
class CapturedBatch:
    """A batch's rows: `tokens` of them in a host buffer, there once `copied` has happened."""

    rows: CaptureBuffer
    tokens: int
    copied: torch.cuda.Event | None


@dataclass
class WrittenBatch:
    """What became of a batch's samples.

    checksums: index → xxh3_128 of its file; bad: index → what is wrong with its states, not
    written; os_error: (errno, text, file) and error: text, of a fault.
    """

    number: int
    checksums: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    os_error: tuple[int | None, str | None, str] | None = None
    error: str | None = None

    def raise_error(self) -> None:
        """The writer's error, whose type is lost on the way between processes."""
        if self.os_error is not None:
            raise OSError(*self.os_error)
        if self.error is not None:
            raise RuntimeError(self.error)


class Writer:
    """Writes the samples of batches to files in threads of its own.

    Args:
        shape: (tokens, layers, hidden) of the largest batch.
        dtype: of the files; float8_e4m3fn adds scales.
        layers: numbers of those captured, in their order.
        pin: page-lock the host buffers, so that a GPU copies into them beside its work.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: str, layers: list[int], pin: bool):
        self.dtype, self.layers = dtype, layers
        self._free: queue.SimpleQueue[CaptureBuffer] = queue.SimpleQueue()
        for _ in range(HOST_BUFFERS):
            self._free.put(CaptureBuffer.empty(shape, dtype, torch.device("cpu"), pin))
        self._batches = ThreadPoolExecutor(HOST_BUFFERS, "batch")
        self._files = ThreadPoolExecutor(WRITERS, "file")
        self._running: list[Future[WrittenBatch]] = []

    def free_buffer(self) -> CaptureBuffer:
        """A free host buffer; waits while all are being written."""
        return self._free.get()

    def give_back(self, rows: CaptureBuffer) -> None:
        self._free.put(rows)

    def submit(
        self, batch: int, captured: CapturedBatch, samples: list[tuple[int, np.ndarray]], out: Path
    ) -> None:
        """Write a batch's samples, (index, token ids [T]) each, beside the next batches."""
        self._running.append(self._batches.submit(self._write, batch, captured, samples, out))

    def finished(self, of_all: bool = False) -> list[WrittenBatch]:
        """Batches written since the last call; `of_all` waits for those submitted."""
        done = [f for f in self._running if of_all or f.done()]
        self._running = [f for f in self._running if f not in done]
        return [f.result() for f in done]

    def close(self) -> None:
        self._batches.shutdown()
        self._files.shutdown()

    def _write(
        self, batch: int, captured: CapturedBatch, samples: list[tuple[int, np.ndarray]], out: Path
    ) -> WrittenBatch:
        """Raises nothing: an error is part of the result, so that none of the others is lost with
        it."""
        result = WrittenBatch(batch)
        try:
            if captured.copied is not None:
                captured.copied.synchronize()
            rows, n = captured.rows, captured.tokens
            starts = match_rows(rows.ids_N[:n].numpy(), rows.positions_N[:n].numpy(), samples)
            files = {}
            for index, ids_T in samples:
                span = slice(starts[index], starts[index] + len(ids_T))
                problem = captured_problem(rows, span, self.layers)
                if problem is None:
                    path = hidden_file(out, index)
                    files[index] = self._files.submit(write_rows, path, rows, span, ids_T)
                else:
                    result.bad[index] = problem
            wait(files.values())  # before the buffer is given back, whatever became of them
            for index, file in files.items():
                result.checksums[index] = file.result()
        except OSError as e:
            result.os_error = (e.errno, e.strerror, str(e.filename or out))
        except Exception as e:  # see WrittenBatch.raise_error
            result.error = one_line(e)
        finally:
            self.give_back(captured.rows)
        return result


def captured_problem(rows: CaptureBuffer, span: slice, layers: list[int]) -> str | None:
    """What is wrong with a sample's states, or None. The rows themselves are read only where the
    largest value of each leaves it open."""
    largest_TL = rows.largest_NL[span].numpy()
    sound = (largest_TL > LEAST_SCALE) & (largest_TL < np.inf)
    if sound.all() and not any(all_alike(largest_T) for largest_T in largest_TL.T):
        return None
    data = rows.states_NLH[span].view(torch.uint8).numpy().reshape(-1)
    form = states_format(rows)
    scale_TL = rows.scale_NL[span].numpy() if form.dtype == FP8 else None
    return states_problem(data, scale_TL, form, layers)


def states_format(rows: CaptureBuffer) -> StatesFormat:
    _, layers, hidden = rows.states_NLH.shape
    return StatesFormat(layers, hidden, str(rows.states_NLH.dtype).removeprefix("torch."))


def write_rows(path: Path, rows: CaptureBuffer, span: slice, ids_T: np.ndarray) -> str:
    """Write one sample's rows; returns the file's checksum."""
    form = states_format(rows)
    parts = [memoryview(file_header(len(ids_T), form)), ids_T.astype("<i8").data]
    if form.dtype == FP8:
        parts.append(rows.scale_NL[span].numpy().data)
    parts.append(rows.states_NLH[span].view(torch.uint8).numpy().data)
    return write_parts(path, parts)


def match_rows(
    ids_N: np.ndarray, positions_N: np.ndarray, samples: list[tuple[int, np.ndarray]]
) -> dict[int, int]:
    """Find each sample's first row in a forward pass: index → row.

    A sample runs in one piece (the token budget is at least its length), so a run of rows at
    positions 0, 1, 2... whose ids are the sample's is the sample, in whatever order a runner
    lays requests out. Samples with equal ids take equal runs in order.
    """
    waiting: dict[bytes, list[int]] = {}
    for index, ids_T in samples:
        waiting.setdefault(ids_T.astype(np.int64).tobytes(), []).append(index)
    found: dict[int, int] = {}
    starts = np.flatnonzero(positions_N == 0).tolist()
    for start, end in zip(starts, [*starts[1:], len(ids_N)], strict=True):
        indices = waiting.get(ids_N[start:end].astype(np.int64).tobytes())
        if indices:
            found[indices.pop(0)] = start
    missing = [i for i, _ in samples if i not in found]
    if missing:
        raise CaptureError(
            f"sample {missing[0]} (and {len(missing) - 1} more of {len(samples)}) was not among the"
            f" {len(ids_N)} rows of its forward pass; was it cut into chunks?"
        )
    return found
