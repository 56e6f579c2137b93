"""Capture from models that call their layers in every way that families of vLLM do.

The toys here have the calls and no attention; that the hooks see the same in vLLM is tested with
real families in test_capture.py and benchmarks/families.py.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.errors import UserError
from common.extraction.capture import CaptureMethods
from common.states.files import hidden_file, read_hidden
from common.verifier.decoder import Decoder
from common.verifier.layer_calls import LOOK_IDS, Recorder, layer_calls

pytestmark = pytest.mark.quick

H, LAYERS, VOCAB = 8, 4, 64


class Layer(nn.Module):
    """Adds a linear product to the stream, which it keeps in two parts where a residual comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def split(self, hidden, residual):
        stream = hidden if residual is None else hidden + residual
        return self.linear(stream), stream

    def whole(self, hidden):
        return hidden + self.linear(hidden)


class PositionsFirst(Layer):
    def forward(self, positions, hidden_states, residual):
        return self.split(hidden_states, residual)


class HiddenFirst(Layer):
    """As gpt-oss: the positions are the second argument; a third result is not of the stream."""

    def forward(self, x, rotary, residual):
        return *self.split(x, residual), x * 3


class NoPositions(Layer):
    def forward(self, hidden_states):
        return self.whole(hidden_states)


class NoResidual(Layer):
    """As Gemma 4: a residual is handed on, and is always None."""

    def forward(self, positions, hidden_states, residual):
        assert residual is None
        return self.whole(hidden_states), None


class Ignored(Layer):
    """As Granite's hybrid: what is returned as residual is part of the hidden states already."""

    def forward(self, hidden_states, residual, pos):
        return self.whole(hidden_states), hidden_states


class Model(nn.Module):
    """Calls `kind` layers by `call`; the stream after each layer is kept in `truth`."""

    def __init__(self, kind: type[Layer], call: str):
        super().__init__()
        torch.manual_seed(0)
        self.embedder = nn.Embedding(VOCAB, H)
        self.blocks = nn.ModuleList(kind() for _ in range(LAYERS))
        self.last_norm = nn.LayerNorm(H)
        self.call = call

    def forward(self, ids, where):
        call, residual = self.call, None
        if call == "batch of one":  # as the Transformers backend
            ids, where = ids[None], where[None]
        if call == "M-RoPE":
            where = where.expand(3, -1)
        hidden, self.truth = self.embedder(ids), []
        for block in self.blocks:
            if call == "keywords":
                out = block(residual=residual, pos=where, hidden_states=hidden)
            elif call == "hidden first":
                out = block(hidden, where, residual)
            elif call in ("hidden only", "batch of one"):
                out = block(hidden)
            else:
                out = block(where, hidden, residual)
            if torch.is_tensor(out):
                hidden = out
            else:
                hidden, residual = out[0], out[1]
            added = residual is not None and not isinstance(block, Ignored)
            self.truth.append((hidden + residual if added else hidden).reshape(-1, H).clone())
        if call in ("hidden first", "M-RoPE"):
            return self.last_norm(hidden + residual)
        if call == "positions first":  # as vLLM's fused norm
            return self.last_norm(hidden.add_(residual))
        return self.last_norm(hidden)


class Worker(CaptureMethods):
    rank = 0

    def __init__(self, model: Model):
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self._decoder = Decoder(
            "", model, "embedder", model.embedder, "blocks", model.blocks,
            "last_norm", model.last_norm,
        )  # fmt: skip
        self._seen = Recorder(model, self._decoder)


def run(model: Model, samples: list[np.ndarray]) -> None:
    """A forward pass as a model runner lays it out: the last sample first."""
    order = samples[::-1]
    ids = torch.from_numpy(np.concatenate(order)).long()
    with torch.no_grad():
        model(ids, torch.cat([torch.arange(len(x)) for x in order]))


@pytest.mark.parametrize(
    ("kind", "call", "said"),
    [
        (PositionsFirst, "positions first", "positions, hidden_states, residual; returns hidden +"),
        (PositionsFirst, "M-RoPE", "positions, hidden_states, residual; returns hidden + residual"),
        (HiddenFirst, "hidden first", "x, rotary, residual; returns hidden + residual and 1 more"),
        (NoPositions, "hidden only", "hidden_states (positions: 1 of the model); returns hidden;"),
        (NoPositions, "batch of one", "hidden_states (positions: 1 of the model); returns hidden;"),
        (NoResidual, "no residual", "positions, hidden_states; returns hidden and 1 more"),
        (Ignored, "keywords", "residual, pos, hidden_states; returns hidden and 1 more"),
    ],
)
def test_the_stream_is_captured_however_layers_are_called(kind, call, said, tmp_path):
    model = Model(kind, call)
    worker = Worker(model)
    run(model, LOOK_IDS)
    run(model, LOOK_IDS)  # not looked at
    found: Any = worker.capture_found(H)
    assert found.refusal is None
    assert f"layers blocks ({kind.__name__} x 4), called with {said}" in found.description
    assert "embedding embedder (Embedding); final norm last_norm (LayerNorm)" in found.description

    samples = [np.array(x, np.int32) for x in ([5, 5, 9], [7], [0, 1, 2, 3, 4])]
    worker.capture_start([1, 3], (32, H), "float32")
    worker.capture_check_layers(True)
    run(model, samples)
    received = worker.capture_check_layers(False)
    worker.capture_submit(0, list(enumerate(samples)), str(tmp_path))
    (result,) = worker.capture_finish() or []
    result.raise_error()
    worker.capture_stop()
    assert received == {1: 0.0}
    start = 0
    for index in (2, 1, 0):
        states_TLH, ids_T = read_hidden(hidden_file(tmp_path, index))
        assert ids_T.tolist() == samples[index].tolist()
        span = slice(start, start := start + len(ids_T))
        want = torch.stack([model.truth[1][span], model.truth[3][span]], 1)
        assert torch.equal(states_TLH, want)
    assert "forward" not in vars(model), "what was put round forward is left"


class Streams(Layer):
    """As hyper-connections: several streams per token."""

    def forward(self, positions, hidden_states, residual):
        return hidden_states.expand(2, *hidden_states.shape).contiguous()


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Streams, {}, r"blocks.0 \(Streams\) returns \(float32 \[2, 32, 8\]\) for 32 tokens of 8"),
        (NoPositions, {"positions": False}, r"called with \(float32 \[32, 8\]\), nor the modules"),
        (NoPositions, {"twice": True}, "blocks.0 is called 2 times in a forward pass, not once"),
        (NoPositions, {"norm": False}, r"nothing reaches the final norm last_norm"),
        (NoPositions, {"embeds": True}, "its embedding embedder gets no token ids"),
    ],
)
def test_what_is_not_understood_is_refused_with_what_was_met(kind, change, said):
    class Odd(Model):
        def forward(self, ids, where):
            hidden = self.embedder.weight[ids] if "embeds" in change else self.embedder(ids)
            for _ in range(1 + ("twice" in change)):
                for block in self.blocks:
                    out = block(hidden) if kind is NoPositions else block(where, hidden, None)
                    hidden = out if kind is NoPositions else hidden
                    if "norm" in change:
                        hidden = hidden * 2
            return self.last_norm(hidden * 2 if "norm" in change else hidden)

    model = Odd(kind, "")
    worker = Worker(model)
    seen: Any = worker._seen
    ids = torch.from_numpy(np.concatenate(LOOK_IDS)).long()
    where = torch.cat([torch.arange(len(x)) for x in LOOK_IDS])
    with torch.no_grad():
        model(ids, where if change.get("positions", True) else where + 1)
    with pytest.raises(UserError, match=rf"cannot capture Odd's layers: .*{said}"):
        layer_calls(seen, H)
    found: Any = worker.capture_found(H)
    assert found.refusal
