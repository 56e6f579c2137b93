"""Capture of the residual stream inside vLLM's workers.

`CaptureMethods` are mixed into vLLM's worker class (common/worker.py) and called through
`LLM.collective_rpc`. Forward hooks on the decoder layers copy the residual stream
("layer i" = after decoder layer i, 0-based); rows are matched to samples by the token ids
that the embedding sees and the positions that the first layer gets, so nothing depends on
how a runner (V1 or V2) orders requests. With tensor parallelism all ranks hold the same
full rows; rank 0 alone captures and writes.

On a GPU a pass costs a few elementwise operations a captured layer: the hooks lay the rows out
as the files have them in one of two buffers on the GPU, and a side stream copies that to the
host while the next pass fills the other.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common.extraction.batching import SLOTS
from common.extraction.writer import CaptureError, Pass, Rows, Writer
from common.states.files import FP8, quantize_rows


def find_decoder(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return (embedding, decoder layers) of the text model inside vLLM's model.

    The layers are the ModuleList called `layers` with as many entries as config.json says;
    wrappers (multimodal, language-model-only) only add to the path before it.
    """
    layers = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and name.split(".")[-1] == "layers" and len(m) == num_layers
    ]
    if len(layers) == 1:
        name, found = layers[0]
        parent = model.get_submodule(name.rpartition(".")[0])
        for embedding in ("embed_tokens", "embedding"):
            if isinstance(getattr(parent, embedding, None), nn.Module):
                return getattr(parent, embedding), found
    names = [
        n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) or n.count(".") < 2
    ]
    raise CaptureError(
        f"cannot find the {num_layers} decoder layers and their embedding in"
        f" {type(model).__name__}; its modules are {', '.join(filter(None, names))}"
    )


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
        embedding, layers = find_decoder(self.model_runner.get_model(), num_layers)
        self._layer_ids = sorted(layer_ids)
        device = next(embedding.parameters()).device
        cuda = device.type == "cuda"
        size = (shape[0], len(layer_ids), shape[1])
        self._writer = Writer(size, storage_dtype, pin=cuda)
        # On a CPU the hooks fill the writer's buffers themselves.
        self._slots = [
            (Rows.empty(size, storage_dtype, device, False), torch.cuda.Event())
            for _ in range(SLOTS * cuda)
        ]
        self._side = torch.cuda.Stream(device) if cuda else None
        self._rows: Rows | None = None  # where the present pass goes
        self._captured: Pass | None = None  # the last pass, not yet submitted
        self._passes = 0  # since the last submission
        self._received: dict[int, torch.Tensor] | None = None
        handles = [
            embedding.register_forward_hook(self._on_embedding),
            layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True),
        ]
        for column, i in enumerate(self._layer_ids):
            handles.append(layers[i].register_forward_hook(self._on_layer(column)))
            if i + 1 < num_layers:
                hook = self._on_next_layer(column)
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
            self._rows = self._writer.take()
        else:
            self._slots.reverse()
            self._rows, copied = self._slots[0]
            # The copy of two passes ago must have read the slot.
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

    def _on_layer(self, column: int):
        def hook(_module, _args, output) -> None:
            if self._rows is None:
                return
            rows, n = self._rows, self._tokens
            # The sum is taken now: the next layer's fused add and norm overwrites both parts.
            hidden_NH, residual_NH = (output, None) if torch.is_tensor(output) else output[:2]
            stream_NH = hidden_NH if residual_NH is None else hidden_NH + residual_NH
            largest_N = torch.linalg.vector_norm(stream_NH, float("inf"), dim=-1)
            rows.finite_NL[:n, column] = torch.isfinite(largest_N)
            if self._writer.dtype == FP8:
                stream_NH, scale_N = quantize_rows(stream_NH, largest_N)
                rows.scale_NL[:n, column] = scale_N
            rows.states_NLH[:n, column].copy_(stream_NH)
            if column + 1 == len(self._layer_ids):
                self._captured = self._copy_to_host(rows, n)

        return hook

    def _copy_to_host(self, rows: Rows, n: int) -> Pass:
        """Start the copy of a pass's rows to the host, beside whatever the GPU does next."""
        if self._side is None:
            return Pass(rows, n, None)
        host = self._writer.take()  # waits when the writers are behind by the whole ring
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            for there, here in zip(host.tensors(), rows.tensors(), strict=True):
                there[:n].copy_(here[:n], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._slots[0] = (rows, copied)
        return Pass(host, n, copied)

    def _on_next_layer(self, column: int):
        """Note what the layer after a captured one receives, while the self-check asks for it."""

        def hook(_module, args, kwargs) -> None:
            if self._received is None or self._rows is None:
                return
            mine = self._rows.states_NLH[: self._tokens, column].double()
            values = [*args, *kwargs.values()]  # positions, hidden, residual
            parts = [v for v in values if isinstance(v, torch.Tensor) and v.shape == mine.shape]
            received = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            error = (received.double() - mine).norm() / mine.norm().clamp_min(1e-30)
            layer = self._layer_ids[column]
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
        self, unit: int, samples: list[tuple[int, np.ndarray]], folder: str
    ) -> dict | None:
        """Have the rows of the pass since the last call written, a sample a file.

        Args:
            unit: number of the planned pass, handed back with its result.
            samples: (index, token ids) of every sample submitted since the last call.
            folder: hidden-states folder; the file names follow from the index.

        Returns:
            {"passes": forward passes run, "finished": results}. Unless it was one pass, nothing
            is written. A result, of this or an earlier unit whose files are all on the disk:
            {"unit", "checksums": {index: xxh3_128 of its file}, "bad": indices with NaN or
            Inf, not written, "os_error": None or (errno, text, file), "error": None or text}.
        """
        if self.rank != 0:
            return None
        passes, captured = self._passes, self._captured
        self._passes, self._captured, self._rows = 0, None, None
        if passes == 1 and captured is not None:
            self._writer.submit(unit, captured, samples, Path(folder))
        elif captured is not None:
            self._writer.give_back(captured.rows)
        return {"passes": passes, "finished": self._writer.finished()}

    def capture_finish(self) -> list[dict] | None:
        """Wait for the writers; returns the results left."""
        return self._writer.finished(of_all=True) if self.rank == 0 else None

    def capture_drop(self) -> list[dict] | None:
        """Forget the rows of a pass that failed; waits for the writers, returns their results."""
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
        self._rows, self._captured, self._slots = None, None, []
        return True
