"""Capture of the residual stream inside vLLM's workers.

`CaptureMethods` are added to vLLM's worker class (common/worker.py) and called through
`LLM.collective_rpc`. Forward hooks on the decoder layers copy the residual stream
("layer i" = after decoder layer i, 0-based); rows are matched to samples by the token ids
that the embedding sees and the positions that the first layer gets, so nothing depends on
how a runner (V1 or V2) orders requests. With tensor parallelism all ranks hold the same
full rows; rank 0 alone captures and writes.

On a GPU this costs a few elementwise operations per captured layer: the hooks lay the rows out
as the files have them in one of two buffers on the GPU, and a side stream copies that to the
host while the next batch fills the other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.extraction.batching import DEVICE_BUFFERS
from common.extraction.writer import (
    CaptureBuffer,
    CapturedBatch,
    CaptureError,
    Writer,
    WrittenBatch,
)
from common.states.files import FP8, quantize_rows
from common.verifier.decoder import find_decoder


@dataclass(frozen=True)
class Submitted:
    """What capture_submit returns.

    passes: forward passes since the one before, of which one is right; finished: this or earlier
    batches, whose files are all on the disk.
    """

    passes: int
    finished: list[WrittenBatch]


class CaptureMethods:
    """Worker methods, each called on all ranks by collective_rpc; capture is rank 0's, others
    return None of it."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def capture_start(
        self, layer_ids: list[int], num_layers: int, shape: tuple[int, int], storage_dtype: str
    ) -> bool | None:
        """Hook the layers on rank 0 and make the buffers.

        Args:
            layer_ids: layers captured, 0-based.
            num_layers: decoder layers of the verifier.
            shape: (most tokens of one forward pass, hidden size).
            storage_dtype: dtype of the files.
        """
        if self.rank != 0:
            return None
        decoder = find_decoder(self.model_runner.get_model(), num_layers)
        embedding, layers = decoder.embedding, decoder.layers
        self._layer_ids = sorted(layer_ids)
        device = next(embedding.parameters()).device
        cuda = device.type == "cuda"
        size = (shape[0], len(layer_ids), shape[1])
        self._writer = Writer(size, storage_dtype, pin=cuda)
        # On a CPU the hooks fill the writer's buffers themselves.
        self._buffers = [
            (CaptureBuffer.empty(size, storage_dtype, device, False), torch.cuda.Event())
            for _ in range(DEVICE_BUFFERS * cuda)
        ]
        self._side = torch.cuda.Stream(device) if cuda else None
        self._rows: CaptureBuffer | None = None  # where the present batch goes
        self._captured: CapturedBatch | None = None  # of the last batch, not yet submitted
        self._passes = 0  # since the last submission
        self._received: dict[int, torch.Tensor] | None = None
        handles = [
            embedding.register_forward_hook(self._on_embedding),
            layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True),
        ]
        for at, i in enumerate(self._layer_ids):
            handles.append(layers[i].register_forward_hook(self._on_layer(at)))
            if i + 1 < num_layers:
                hook = self._on_next_layer(at)
                handles.append(layers[i + 1].register_forward_pre_hook(hook, with_kwargs=True))
        self._handles = handles
        return True

    # ------------------------------------------------------------ hooks

    def _on_embedding(self, _module, args, _output) -> None:
        self._passes += 1
        self._rows = None
        if self._passes > 1:  # not as planned: capture_submit reports it
            return
        ids_N = args[0].view(-1)
        self._tokens = len(ids_N)
        if self._side is None:
            self._rows = self._writer.free_buffer()
        else:
            self._buffers.reverse()
            self._rows, copied = self._buffers[0]
            # The copy of two batches ago must have read the buffer.
            torch.cuda.current_stream().wait_event(copied)
        if self._tokens > len(self._rows.ids_N):
            raise CaptureError(f"a forward pass of {self._tokens} tokens is over the budget")
        self._rows.ids_N[: self._tokens].copy_(ids_N)

    def _on_first_layer(self, _module, args, kwargs) -> None:
        if self._rows is None:
            return
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        # M-RoPE models pass [3, N]; text has three equal rows.
        self._rows.positions_N[: self._tokens].copy_(positions.view(-1, self._tokens)[0])

    def _on_layer(self, at: int):
        def hook(_module, _args, output) -> None:
            if self._rows is None:
                return
            rows, n = self._rows, self._tokens
            # The sum is taken now: the next layer's fused add and norm overwrites both parts.
            hidden_NH, residual_NH = (output, None) if torch.is_tensor(output) else output[:2]
            stream_NH = hidden_NH if residual_NH is None else hidden_NH + residual_NH
            largest_N = torch.linalg.vector_norm(stream_NH, float("inf"), dim=-1)
            rows.finite_NL[:n, at] = torch.isfinite(largest_N)
            if self._writer.dtype == FP8:
                stream_NH, scale_N = quantize_rows(stream_NH, largest_N)
                rows.scale_NL[:n, at] = scale_N
            rows.states_NLH[:n, at].copy_(stream_NH)
            if at + 1 == len(self._layer_ids):
                self._captured = self._copy_to_host(rows, n)

        return hook

    def _copy_to_host(self, rows: CaptureBuffer, n: int) -> CapturedBatch:
        """Start the copy of a batch's rows to the host, beside whatever the GPU does next."""
        if self._side is None:
            return CapturedBatch(rows, n, None)
        host = self._writer.free_buffer()  # waits while the writers are behind by all buffers
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for there, here in zip(host.tensors(), rows.tensors(), strict=True):
                there[:n].copy_(here[:n], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._buffers[0] = (rows, copied)
        return CapturedBatch(host, n, copied)

    def _on_next_layer(self, at: int):
        """Note what the layer after a captured one receives, during the self-check."""

        def hook(_module, args, kwargs) -> None:
            if self._received is None or self._rows is None:
                return
            mine = self._rows.states_NLH[: self._tokens, at].double()
            values = [*args, *kwargs.values()]  # positions, hidden, residual
            parts = [v for v in values if isinstance(v, torch.Tensor) and v.shape == mine.shape]
            received = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            error = (received.double() - mine).norm() / mine.norm().clamp_min(1e-30)
            layer = self._layer_ids[at]
            self._received[layer] = torch.maximum(self._received.get(layer, error), error)

        return hook

    # ------------------------------------------------------------ calls

    def capture_check_layers(self, on: bool) -> dict[int, float] | None:
        """Switch the comparison with the next layer's input on, or off and return, per layer,
        the relative difference between what was captured and what the next layer received."""
        if self.rank != 0:
            return None
        found, self._received = self._received, {} if on else None
        return {} if on else {i: float(e) for i, e in (found or {}).items()}

    def capture_submit(
        self, batch: int, samples: list[tuple[int, np.ndarray]], folder: str
    ) -> Submitted | None:
        """Have the rows of the forward pass since the last call written, a sample per file.

        Args:
            batch: number of the planned batch, handed back with its result.
            samples: (index, token ids int32 [T]) of every sample submitted since the last call.
            folder: hidden-states folder; the file names follow from the index.

        Nothing is written unless it was one forward pass.
        """
        if self.rank != 0:
            return None
        passes, captured = self._passes, self._captured
        self._passes, self._captured, self._rows = 0, None, None
        if passes == 1 and captured is not None:
            self._writer.submit(batch, captured, samples, Path(folder))
        elif captured is not None:
            self._writer.give_back(captured.rows)
        return Submitted(passes, self._writer.finished())

    def capture_finish(self) -> list[WrittenBatch] | None:
        """Wait for the writers; returns the results left."""
        return self._writer.finished(of_all=True) if self.rank == 0 else None

    def capture_drop(self) -> list[WrittenBatch] | None:
        """Forget the rows of a batch that failed; waits for the writers, returns their results."""
        if self.rank != 0:
            return None
        if self._captured is not None:
            self._writer.give_back(self._captured.rows)
        elif self._side is None and self._rows is not None:
            self._writer.give_back(self._rows)
        self._rows, self._captured, self._passes = None, None, 0
        return self._writer.finished(of_all=True)

    def capture_clean_cache(self) -> bool:
        """Zero the KV cache, on every rank; no request may be running. Attention on CPUs reads
        past a sample's end in its last block, where NaN of an earlier sample times 0 is NaN."""
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                tensor.zero_()
        return True

    def capture_stop(self) -> bool | None:
        """Remove the hooks, end the writers and free the buffers."""
        if self.rank != 0:
            return None
        for handle in self._handles:
            handle.remove()
        self._writer.close()
        self._rows, self._captured, self._buffers = None, None, []
        return True
