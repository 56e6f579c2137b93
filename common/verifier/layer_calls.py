"""How a verifier calls its decoder layers, seen in one forward pass.

Families differ in what a layer is called with, in which order and by which names, in whether it
gets positions at all, and in what it returns. A forward pass over two samples of known ids tells:
positions are the integers that count the tokens of these samples, hidden states and residual the
floats of tokens x hidden size, and those of a layer's results that reach the next layer and the
final norm make up the residual stream. The hooks of capture.py then read fixed places.

Shape suffixes: N tokens of the forward pass, H hidden size.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from common.errors import UserError
from common.verifier.decoder import Decoder, join, outwards

# Two samples of which each id says its position: 31, 30 ... 12 and 11, 10 ... 0.
LOOK_IDS = [np.arange(31, 11, -1, dtype=np.int32), np.arange(11, -1, -1, dtype=np.int32)]
LOOK_TOKENS = 32

Slot = int | str  # where a call has a value: its index or its keyword


@dataclass(frozen=True)
class Place:
    """A value in the calls of a module, by the module's dotted name."""

    path: str
    slot: Slot

    def read(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        return kwargs[self.slot] if isinstance(self.slot, str) else args[self.slot]


@dataclass(frozen=True)
class LayerCalls:
    """Where the residual stream and the positions are.

    positions: in the calls of the first layer, or of a module round the layers; results: the
    entries of a layer's result whose sum is the stream; received: layer after the first → the
    places of these in its call.
    """

    positions: Place
    results: tuple[int, ...]
    received: dict[int, tuple[Place, ...]]

    def stream(self, output: Any) -> torch.Tensor:
        """The residual stream [N, H] of a layer's result."""
        if torch.is_tensor(output):
            stream = output
        else:
            # The sum is taken now: the next layer's fused add and norm overwrites both parts.
            stream = output[self.results[0]]
            for at in self.results[1:]:
                if output[at] is not None:
                    stream = stream + output[at]
        return stream if stream.dim() == 2 else stream.view(-1, stream.shape[-1])


class Recorder:
    """Notes the calls of the layers, of what is round them and of the final norm."""

    def __init__(self, root: nn.Module, decoder: Decoder):
        self.decoder = decoder
        self.ids_N: torch.Tensor | None = None
        self.over = False
        self.calls: dict[str, list[dict[Slot, Any]]] = {}  # by dotted name
        self.results: list[list[Any]] = [[] for _ in decoder.layers]
        self.copies: list[Any] = []  # of the last layer's results and the norm's arguments, which
        self.norm_copies: list[Any] = []  # fused operations overwrite
        self._undo: list[Callable[[], None]] = []
        self._undo.append(decoder.embedding.register_forward_pre_hook(self._note_ids).remove)
        for path in outwards(decoder.layers_path):
            note = functools.partial(self._note, path)
            self._undo.append(before_forward(root.get_submodule(path), note))
        for i, layer in enumerate(decoder.layers):
            self._hook(join(decoder.layers_path, str(i)), layer)
            hook = functools.partial(self._note_result, i)
            self._undo.append(layer.register_forward_hook(hook).remove)
        self._hook(decoder.norm_path, decoder.norm)

    def remove(self) -> None:
        for undo in self._undo:
            undo()

    def _hook(self, path: str, module: nn.Module) -> None:
        hook = lambda _m, args, kwargs: self._note(path, args, kwargs)  # noqa: E731
        self._undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _note_ids(self, _module: nn.Module, args: tuple) -> None:
        self.over = self.ids_N is not None  # an engine of one request at a time makes two passes
        if self.ids_N is None and args:
            self.ids_N = args[0].reshape(-1).clone()

    def _note(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.over:
            return
        call: dict[Slot, Any] = dict(enumerate(args))
        call.update(kwargs)  # type: ignore[arg-type]
        self.calls.setdefault(path, []).append(call)
        if path == self.decoder.norm_path and not self.norm_copies:
            self.norm_copies = copies(call.values())

    def _note_result(self, i: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        if self.over:
            return
        self.results[i] = [output] if torch.is_tensor(output) else list(output)
        if i + 1 == len(self.results):
            self.copies = copies(self.results[i])


def copies(values: Any) -> list[Any]:
    return [v.clone() if torch.is_tensor(v) else v for v in values]


def before_forward(module: nn.Module, note: Callable[[tuple, dict], None]) -> Callable[[], None]:
    """Have `note` called with the arguments of each `module.forward`; returns what undoes it.

    For modules that vLLM may compile: their `__call__` is vLLM's own, and runs no hooks.
    """
    forward, own = module.forward, "forward" in vars(module)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(args, kwargs)
        return forward(*args, **kwargs)

    def undo() -> None:
        if own:
            module.forward = forward
        else:
            del module.forward

    module.forward = noted
    return undo


# ---------------------------------------------------------------- what was seen


def layer_calls(seen: Recorder, hidden_size: int) -> LayerCalls:
    """Find the places in what was seen in a forward pass over LOOK_IDS; UserError, naming the
    class and what it met, where they cannot be told."""
    decoder = seen.decoder
    if seen.ids_N is None:
        raise refusal(decoder, f"its embedding {decoder.embedding_path} gets no token ids")
    paths = [join(decoder.layers_path, str(i)) for i in range(len(decoder.layers))]
    for path in paths:
        times = len(seen.calls.get(path, []))
        if times != 1:
            raise refusal(decoder, f"{path} is called {times} times in a forward pass, not once")
    results = stream_results(seen, hidden_size)
    received = {
        i: places_received(seen, paths, i, results, hidden_size) for i in range(1, len(paths))
    }
    return LayerCalls(positions_place(seen, paths[0]), results, received)


def stream_results(seen: Recorder, hidden_size: int) -> tuple[int, ...]:
    """Which entries of a layer's result add up to the residual stream: those whose sum the final
    norm gets, in one part or two; where it sees other tokens, those that the next layer gets."""
    assert seen.ids_N is not None
    tokens, decoder = len(seen.ids_N), seen.decoder
    for i, result in enumerate(seen.results):
        if not streams(result, tokens, hidden_size):
            path = join(decoder.layers_path, str(i))
            raise refusal(
                decoder,
                f"{path} ({type(decoder.layers[i]).__name__}) returns {shown(result)} for {tokens}"
                f" tokens of {hidden_size}",
            )
    last = streams(seen.results[-1], tokens, hidden_size)
    calls = seen.calls.get(decoder.norm_path, [])
    given = streams(list(calls[0].values()), tokens, hidden_size) if calls else []
    if given:
        entered = sum(seen.norm_copies[g].reshape(tokens, -1).double() for g in given)
        for parts in (last[:1], last[:2]):
            left = sum(seen.copies[k].reshape(tokens, -1).double() for k in parts)
            if (left - entered).norm() < 1e-2 * entered.norm():
                return tuple(parts)
    if len(seen.results) > 1:
        last_call = seen.calls[join(decoder.layers_path, str(len(decoder.layers) - 1))][0]
        before = streams(seen.results[-2], tokens, hidden_size)
        same = [k for k in before if any(seen.results[-2][k] is v for v in last_call.values())]
        if same:
            return tuple(same)
    raise refusal(
        decoder,
        f"of {shown(seen.results[-1])}, which its last layer returns, nothing reaches the final"
        f" norm {decoder.norm_path}",
    )


def places_received(
    seen: Recorder, paths: list[str], i: int, results: tuple[int, ...], hidden_size: int
) -> tuple[Place, ...]:
    """Where layer i gets what makes up the stream after layer i - 1."""
    assert seen.ids_N is not None
    (call,), before = seen.calls[paths[i]], seen.results[i - 1]
    parts = [before[k] for k in results if k < len(before) and before[k] is not None]
    slots = [slot for slot, v in call.items() if any(v is part for part in parts)]
    if len(slots) < len(parts):  # something of the model's own is between the layers
        keys = list(call)
        slots = [keys[k] for k in streams(list(call.values()), len(seen.ids_N), hidden_size)]
        slots = slots[: len(parts)]
    if not slots:
        raise refusal(seen.decoder, f"{paths[i]} is called with {shown(call.values())}")
    return tuple(Place(paths[i], slot) for slot in slots)


def positions_place(seen: Recorder, first: str) -> Place:
    """Where the positions are: in the first layer's call, or in that of the innermost module round
    the layers that gets them."""
    assert seen.ids_N is not None
    position_of = np.empty(LOOK_TOKENS, np.int64)
    for ids in LOOK_IDS:
        position_of[ids] = np.arange(len(ids))
    tokens = len(seen.ids_N)
    expected = torch.from_numpy(
        position_of[seen.ids_N[:LOOK_TOKENS].cpu().numpy()]
    )  # the rest is padding
    for path in (first, *outwards(seen.decoder.layers_path)):
        for call in seen.calls.get(path, [])[:1]:
            for slot, value in call.items():
                if is_integers(value, tokens):
                    row_N = value.reshape(-1, tokens)[0].cpu()  # M-RoPE: three equal rows for text
                    if torch.equal(row_N[:LOOK_TOKENS].to(torch.int64), expected):
                        return Place(path, slot)
    met = shown(seen.calls[first][0].values())
    raise refusal(
        seen.decoder,
        f"neither its layers, called with {met}, nor the modules round them get the positions of"
        f" {tokens} tokens",
    )


def is_integers(value: Any, tokens: int) -> bool:
    return (
        torch.is_tensor(value)
        and not value.is_floating_point()
        and value.dtype != torch.bool
        and value.dim() > 0
        and value.shape[-1] == tokens
    )


def streams(values: list[Any], tokens: int, hidden_size: int) -> list[int]:
    """Indices of the values that can be hidden states or a residual, [N, H] or [1, N, H]."""
    return [
        k
        for k, v in enumerate(values)
        if torch.is_tensor(v)
        and v.is_floating_point()
        and v.numel() == tokens * hidden_size
        and v.shape[-1] == hidden_size
    ]


# ---------------------------------------------------------------- said to people


def describe(seen: Recorder, calls: LayerCalls) -> str:
    """What was found, on one line."""
    d = seen.decoder
    i = min(1, len(d.layers) - 1)  # the first layer may get no residual yet
    call = seen.calls[join(d.layers_path, str(i))][0]
    classes = Counter(type(layer).__name__ for layer in d.layers)
    layers = ", ".join(f"{name} x {count}" for name, count in classes.items())
    text = f"layers {d.layers_path} ({layers}), called with {given_names(d.layers[i], call)}"
    if not calls.positions.path.startswith(f"{d.layers_path}."):
        text += f" (positions: {calls.positions.slot} of {calls.positions.path or 'the model'})"
    names = ["hidden", "residual"][: len(calls.results)]
    text += f"; returns {' + '.join(names)}"
    more = len(seen.results[i]) - len(calls.results)
    text += f" and {more} more" if more else ""
    text += f"; embedding {d.embedding_path} ({type(d.embedding).__name__})"
    return f"{text}; final norm {d.norm_path} ({type(d.norm).__name__})"


def given_names(module: nn.Module, call: dict[Slot, Any]) -> str:
    """Names of a call's arguments that are not None, as the module's signature has them."""
    names = list(inspect.signature(module.forward).parameters)
    return ", ".join(
        names[slot] if isinstance(slot, int) and slot < len(names) else str(slot)
        for slot, value in call.items()
        if value is not None
    )


def shown(values: Any) -> str:
    """Values of a call or a result, tensors by dtype and shape."""
    return "(" + ", ".join(
        f"{str(v.dtype).removeprefix('torch.')} {list(v.shape)}" if torch.is_tensor(v)
        else "None" if v is None else type(v).__name__
        for v in values
    ) + ")"  # fmt: skip


def refusal(decoder: Decoder, met: str) -> UserError:
    return UserError(f"cannot capture {type(decoder.model).__name__}'s layers: {met}")
