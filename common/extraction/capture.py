"""Capture of the residual stream inside vLLM's workers.

`CaptureMethods` are added to vLLM's worker class (common/worker.py) and called through
`LLM.collective_rpc`. Forward hooks on the decoder layers copy the residual stream
("layer i" = after decoder layer i, 0-based); rows are matched to samples by the token ids
that the embedding sees and the positions that the layers get, so nothing depends on
how a runner (V1 or V2) orders requests. With tensor parallelism all ranks hold the same
full rows; rank 0 alone captures and writes. Where a family's calls have hidden states and positions
is found in one forward pass before (layer_calls.py).

On a GPU this costs a few elementwise operations per captured layer: the hooks lay the rows out
as the files have them in one of two buffers on the GPU, and a side stream copies that to the
host while the next batch fills the other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import UserError
from common.extraction.batching import DEVICE_BUFFERS
from common.extraction.writer import (
    CaptureBuffer,
    CapturedBatch,
    CaptureError,
    Writer,
    WrittenBatch,
)
from common.states.files import FP8, quantize_rows
from common.verifier.decoder import Decoder, find_decoder, join
from common.verifier.layer_calls import (
    LayerCalls,
    Recorder,
    before_forward,
    describe,
    layer_calls,
)


@dataclass(frozen=True)
class Found:
    """What capture_found returns: what it found of the layers, or why it cannot capture them. An
    exception would reach the driver of several ranks as one of vLLM's."""

    description: str | None = None
    refusal: str | None = None


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

    _decoder: Decoder
    _calls: LayerCalls

    # ------------------------------------------------------------ once per engine

    def capture_look(self, num_layers: int) -> None:
        """Have rank 0 note how the next forward pass, over LOOK_IDS, calls the decoder layers."""
        self._seen: Recorder | UserError | None = None
        if self.rank != 0:
            return
        model = self.model_runner.get_model()
        try:
            self._decoder = find_decoder(model, num_layers)
            self._seen = Recorder(model, self._decoder)
        except UserError as e:
            self._seen = e

    def capture_found(self, hidden_size: int) -> Found | None:
        """What the forward pass since capture_look showed."""
        seen, self._seen = self._seen, None
        if seen is None:
            return None
        try:
            if isinstance(seen, UserError):
                raise seen
            seen.remove()
            self._calls = layer_calls(seen, hidden_size)
            return Found(describe(seen, self._calls))
        except UserError as e:
            return Found(refusal=str(e))

    # ------------------------------------------------------------ start

    def capture_start(
        self, layer_ids: list[int], shape: tuple[int, int], storage_dtype: str
    ) -> bool | None:
        """Hook the layers on rank 0 and make the buffers.

        Args:
            layer_ids: layers captured, 0-based.
            shape: (most tokens of one forward pass, hidden size).
            storage_dtype: dtype of the files.
        """
        if self.rank != 0:
            return None
        embedding, layers = self._decoder.embedding, self._decoder.layers
        self._layer_ids = sorted(layer_ids)
        device = next(embedding.parameters()).device
        cuda = device.type == "cuda"
        size = (shape[0], len(layer_ids), shape[1])
        self._writer = Writer(size, storage_dtype, self._layer_ids, pin=cuda)
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
        self._undo = [embedding.register_forward_hook(self._on_embedding).remove]
        self._hook_positions()
        for at, i in enumerate(self._layer_ids):
            self._undo.append(layers[i].register_forward_hook(self._on_layer(at)).remove)
            if i + 1 < len(layers):
                hook = self._on_next_layer(at)
                handle = layers[i + 1].register_forward_pre_hook(hook, with_kwargs=True)
                self._undo.append(handle.remove)
        return True

    def _hook_positions(self) -> None:
        """Read the positions where the first layer gets them, or the module that does."""
        place, first = self._calls.positions, self._decoder.layers[0]
        if place.path == join(self._decoder.layers_path, "0"):
            hook = first.register_forward_pre_hook(
                lambda _m, args, kwargs: self._on_positions(place.read(args, kwargs)),
                with_kwargs=True,
            )
            self._undo.append(hook.remove)
            return

        def note(args: tuple, kwargs: dict[str, Any]) -> None:
            self._positions = place.read(args, kwargs)

        module = self.model_runner.get_model().get_submodule(place.path)
        self._undo.append(before_forward(module, note))
        hook = first.register_forward_pre_hook(lambda _m, _a: self._on_positions(self._positions))
        self._undo.append(hook.remove)

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

    def _on_positions(self, positions: torch.Tensor) -> None:
        if self._rows is None:
            return
        # M-RoPE models pass [3, N]; text has three equal rows.
        self._rows.positions_N[: self._tokens].copy_(positions.view(-1, self._tokens)[0])

    def _on_layer(self, at: int):
        stream = self._calls.stream

        def hook(_module, _args, output) -> None:
            if self._rows is None:
                return
            rows, n = self._rows, self._tokens
            stream_NH = stream(output)
            largest_N = torch.linalg.vector_norm(stream_NH, float("inf"), dim=-1)
            rows.largest_NL[:n, at] = largest_N
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
        places = self._calls.received[self._layer_ids[at] + 1]

        def hook(_module, args, kwargs) -> None:
            if self._received is None or self._rows is None:
                return
            mine = self._rows.states_NLH[: self._tokens, at].double()
            received = sum(place.read(args, kwargs) for place in places).view(mine.shape)
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
        for undo in self._undo:
            undo()
        self._writer.close()
        self._rows, self._captured, self._buffers = None, None, []
        return True
