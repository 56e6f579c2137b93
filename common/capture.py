"""Capture of the residual stream inside vLLM's workers.

`CaptureMethods` are mixed into vLLM's worker class (common/worker.py) and called through
`LLM.collective_rpc`. Forward hooks on the decoder layers copy the residual stream
("layer i" = after decoder layer i, 0-based); rows are matched to samples by the token ids
that the embedding sees and the positions that the first layer gets, so nothing depends on
how a runner (V1 or V2) orders requests. With tensor parallelism all ranks hold the same
full rows; rank 0 alone captures and writes.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.hidden_files import hidden_file, write_hidden

WRITERS = 4


class CaptureError(RuntimeError):
    """The captured rows are not what was submitted, or the layers could not be found."""


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


def residual_stream(output: Any) -> torch.Tensor:
    """Residual stream [N, H] of a layer's output or input pair (hidden, residual).

    The sum is a new tensor: both parts are overwritten in place by the next layer's fused
    add and norm.
    """
    if isinstance(output, torch.Tensor):
        return output.clone()
    hidden, residual = output[0], output[1]
    return hidden.clone() if residual is None else hidden + residual


class CaptureMethods:
    """Worker methods, each called on all ranks by collective_rpc; others than 0 do nothing."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def capture_start(self, layer_ids: list[int], num_layers: int) -> bool:
        """Hook the layers on rank 0; returns whether this rank captures."""
        if self.rank != 0:
            return False
        embedding, layers = find_decoder(self.model_runner.get_model(), num_layers)
        self._layer_ids = sorted(layer_ids)
        self._passes: list[dict] = []  # one a forward pass: ids, positions, layer → rows
        self._received: dict[int, torch.Tensor] | None = None
        self._pool = ThreadPoolExecutor(WRITERS)
        handles = [
            embedding.register_forward_hook(self._on_embedding),
            layers[0].register_forward_pre_hook(self._on_first_layer, with_kwargs=True),
        ]
        for i in self._layer_ids:
            handles.append(layers[i].register_forward_hook(self._on_layer(i)))
            if i + 1 < num_layers:
                hook = self._on_next_layer(i)
                handles.append(layers[i + 1].register_forward_pre_hook(hook, with_kwargs=True))
        self._handles = handles
        return True

    # ------------------------------------------------------------ hooks

    def _on_embedding(self, _module, args, _output) -> None:
        self._passes.append({"ids": args[0].detach().clone().view(-1), "layers": {}})

    def _on_first_layer(self, _module, args, kwargs) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        # M-RoPE models pass [3, N]; text has three equal rows.
        self._passes[-1]["positions"] = positions.detach().clone().view(-1, positions.shape[-1])[0]

    def _on_layer(self, i: int):
        def hook(_module, _args, output) -> None:
            self._passes[-1]["layers"][i] = residual_stream(output)

        return hook

    def _on_next_layer(self, i: int):
        """Note what layer i + 1 receives, while the self-check asks for it."""

        def hook(_module, args, kwargs) -> None:
            if self._received is None:
                return
            mine = self._passes[-1]["layers"][i].double()
            values = [*args, *kwargs.values()]  # positions, hidden, residual
            parts = [v for v in values if isinstance(v, torch.Tensor) and v.shape == mine.shape]
            received = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            error = (received.double() - mine).norm() / mine.norm().clamp_min(1e-30)
            self._received[i] = torch.maximum(self._received.get(i, error), error)

        return hook

    # ------------------------------------------------------------ calls

    def capture_check_layers(self, on: bool) -> dict[int, float] | None:
        """Switch the comparison with the next layer's input on, or off and return, per layer,
        the relative difference between what was captured and what the next layer received."""
        if self.rank != 0:
            return None
        found, self._received = self._received, {} if on else None
        return None if on else {i: float(e) for i, e in (found or {}).items()}

    def capture_write(
        self, samples: list[tuple[int, list[int]]], folder: str, storage_dtype: str
    ) -> dict | None:
        """Write the rows of the passes since the last call, a sample a file.

        Args:
            samples: (index, token ids) of every sample submitted since the last call.
            folder: hidden-states folder; the file names follow from the index.
            storage_dtype: dtype of the files.

        Returns:
            {"passes": forward passes run, "sha256": {index: hash of its file},
            "bad": indices with NaN or Inf, not written}, or {"os_error": (errno, text, file)}.
        """
        if self.rank != 0:
            return None
        passes, self._passes = self._passes, []
        rows = match_rows(passes, samples)
        dtype = getattr(torch, storage_dtype)
        stacked = [
            torch.stack([p["layers"][i] for i in self._layer_ids], dim=1).to("cpu", dtype)
            for p in passes
        ]  # a pass: [N, L, H]
        # The writers' threads run no tensor operations: on a CPU each would start threads of
        # its own and slow the others down.
        finite = [torch.isfinite(x_NLH).flatten(1).all(1) for x_NLH in stacked]
        futures, bad = {}, []
        for index, ids in samples:
            number, start = rows[index]
            span = slice(start, start + len(ids))
            if not bool(finite[number][span].all()):
                bad.append(index)
                continue
            tokens = torch.tensor(ids, dtype=torch.int64)
            path = hidden_file(Path(folder), index)
            futures[index] = self._pool.submit(write_hidden, path, stacked[number][span], tokens)
        hashes: dict[int, str] = {}
        for index, future in futures.items():
            try:
                hashes[index] = future.result()
            except OSError as e:  # a full disk; exceptions lose their type on the way to rank 0
                return {"os_error": (e.errno, e.strerror, str(e.filename or folder))}
        return {"passes": len(passes), "sha256": hashes, "bad": bad}

    def capture_stop(self) -> None:
        """Remove the hooks and end the writers."""
        if self.rank == 0:
            for handle in self._handles:
                handle.remove()
            self._pool.shutdown()


def match_rows(
    passes: list[dict], samples: list[tuple[int, list[int]]]
) -> dict[int, tuple[int, int]]:
    """Find each sample's rows: index → (forward pass, first row).

    A sample runs whole in one pass (the token budget is at least its length), so a run of
    rows at positions 0, 1, 2... whose ids are the sample's is the sample. Samples with
    equal ids take equal runs in order.
    """
    waiting: dict[bytes, list[int]] = {}
    lengths: dict[int, int] = {}
    for index, ids in samples:
        waiting.setdefault(key_of(torch.tensor(ids)), []).append(index)
        lengths[index] = len(ids)
    found: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(passes):
        starts = (one["positions"] == 0).nonzero().view(-1).tolist()
        ids = one["ids"].cpu()
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            indices = waiting.get(key_of(ids[start:end]))
            if indices:
                found[indices.pop(0)] = (number, start)
    missing = [i for i, _ in samples if i not in found]
    if missing:
        raise CaptureError(
            f"sample {missing[0]} (and {len(missing) - 1} more of {len(samples)}) was not among the"
            f" rows of {len(passes)} forward passes of {[len(p['ids']) for p in passes]} tokens;"
            " was it cut into chunks?"
        )
    return found


def key_of(ids: torch.Tensor) -> bytes:
    return ids.to(torch.int64).contiguous().numpy().tobytes()
