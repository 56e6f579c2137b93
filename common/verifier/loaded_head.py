"""Embedding, head and final norm of the verifier that vLLM has loaded, read in its workers.

`HeadMethods` are added to vLLM's worker class (common/worker.py) and called through
`LLM.collective_rpc` on all ranks. Each rank writes the rows that it holds to their place in one
file, so that nothing is gathered over the ranks and no rank holds more than a slice twice.

Shape suffixes: N rows, H hidden size, V vocabulary.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common.verifier.decoder import Decoder, find_decoder
from common.verifier.logits import rms_norm

ROWS_AT_ONCE = 2048  # 29 MB of Kimi-K2.5's head in bfloat16
NORM_GATE = 2e-2  # relative difference from the norm module's own output; bfloat16 gives 4e-3


@dataclass(frozen=True)
class VocabularyShare:
    """A rank's share of a [V, ...] tensor: rows first to last - 1."""

    first: int
    last: int


@dataclass(frozen=True)
class LoadedHead:
    """What a rank has of the head; see HeadFacts.

    embed, head: its rows (head None where tied); bias: whether there is one; problem: what is not
    understood, for an error; described: the modules, for people.
    """

    dtype: str = ""
    embed: VocabularyShare = VocabularyShare(0, 0)
    head: VocabularyShare | None = None
    bias: bool = False
    norm_eps: float = 0.0
    logit_scale: float = 1.0
    soft_cap: float | None = None
    described: str = ""
    problem: str = ""


@dataclass(frozen=True)
class HeadModules:
    """embedding, norm, and the module whose weight is the head's (the embedding where tied)."""

    embedding: Any
    norm: nn.Module
    head: Any
    processor: Any  # vLLM's LogitsProcessor

    @property
    def tied(self) -> bool:
        theirs, ours = self.embedding.weight, self.head.weight
        return self.head is self.embedding or theirs.data_ptr() == ours.data_ptr()


class HeadMethods:
    """Worker methods, each called on all ranks by collective_rpc."""

    rank: int  # vLLM's worker has both
    model_runner: Any

    def head_describe(self, num_layers: int, vocab_size: int) -> LoadedHead:
        """What this rank has of the verifier's head; its `problem` where that is not understood."""
        model = self.model_runner.get_model()
        try:
            found = head_modules(model, find_decoder(model, num_layers))
            with torch.inference_mode():
                _, eps = effective_norm(found.norm, found.embedding.weight.dtype)
        except LookupError as e:
            return LoadedHead(problem=str(e))
        for name, module in (("embedding", found.embedding), ("head", found.head)):
            weight = module.weight
            if not weight.is_floating_point() or weight.itemsize < 2 or weight.dim() != 2:
                return LoadedHead(
                    problem=f"its {name} is {tuple(weight.shape)} {weight.dtype} in vLLM"
                    f" ({type(module).__name__}), neither bfloat16, float16 nor float32"
                )
        if found.embedding.weight.dtype != found.head.weight.dtype:
            return LoadedHead(
                problem=f"its embedding is {found.embedding.weight.dtype}, its head"
                f" {found.head.weight.dtype}"
            )
        soft_cap = found.processor.soft_cap
        return LoadedHead(
            dtype=str(found.embedding.weight.dtype).removeprefix("torch."),
            embed=rows_of(found.embedding, vocab_size),
            head=None if found.tied else rows_of(found.head, vocab_size),
            bias=getattr(found.head, "bias", None) is not None,
            norm_eps=eps,
            logit_scale=float(found.processor.scale),
            soft_cap=None if soft_cap is None else float(soft_cap),
            described=f"final norm {type(found.norm).__name__}, head {type(found.head).__name__}",
        )

    def head_write(
        self, num_layers: int, vocab_size: int, path: str, begin: dict[str, int]
    ) -> None:
        """Write this rank's rows, and the first rank the norm, to their places in a file.

        Args:
            begin: tensor name → its first byte.
        """
        model = self.model_runner.get_model()
        found = head_modules(model, find_decoder(model, num_layers))
        tensors = {"embed_tokens": found.embedding, "lm_head": found.head}
        file = os.open(path, os.O_WRONLY)
        try:
            for name in tensors.keys() & begin.keys():
                write_rows(file, begin[name], tensors[name], "weight", vocab_size)
            if "lm_head_bias" in begin:
                write_rows(file, begin["lm_head_bias"], found.head, "bias", vocab_size)
            if self.rank == 0:
                with torch.inference_mode():
                    norm_H, _ = effective_norm(found.norm, found.embedding.weight.dtype)
                os.pwrite(file, norm_H.cpu().numpy().data, begin["norm"])
            os.fsync(file)
        finally:
            os.close(file)

    def head_watch(self, num_layers: int, tokens: int) -> None:
        """Keep what enters layer 0, and of which ids, of the first `tokens` tokens of the next
        forward pass, on the first rank."""
        if self.rank != 0:
            return
        decoder = find_decoder(self.model_runner.get_model(), num_layers)
        ids: list[torch.Tensor] = []
        entered: list[torch.Tensor] = []

        def on_embedding(_module: nn.Module, args: tuple, _output: Any) -> None:
            ids[:] = ids or [args[0].view(-1)[:tokens].cpu()]

        def on_layer(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            values = [*args, *kwargs.values()]
            floats = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
            rows = [v.view(-1, v.shape[-1])[:tokens].float().cpu() for v in floats if v.dim() > 1]
            entered[:] = entered or rows[:1]

        hooks = [
            decoder.embedding.register_forward_hook(on_embedding),
            decoder.layers[0].register_forward_pre_hook(on_layer, with_kwargs=True),
        ]
        self._head_watched = ids, entered, hooks

    def head_watched(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(ids int64 [N], what entered layer 0 of them float32 [N, H]) since head_watch, of the
        first rank; both empty where nothing was seen."""
        if self.rank != 0:
            return None
        ids, entered, hooks = self._head_watched
        for hook in hooks:
            hook.remove()
        if not ids or not entered:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
        return ids[0].long(), entered[0]


def head_modules(model: nn.Module, decoder: Decoder) -> HeadModules:
    """The embedding, final norm and head of the text model; LookupError saying what is missing.

    The head belongs to the innermost wrapper of the text model that has vLLM's LogitsProcessor; a
    family without an lm_head of its own hands that the embedding.
    """
    path = decoder.path
    while True:
        owner = model.get_submodule(path)
        processor = getattr(owner, "logits_processor", None)
        if processor is not None:
            head = getattr(owner, "lm_head", None) or decoder.embedding
            if getattr(head, "weight", None) is None:
                raise LookupError(f"its head {type(head).__name__} has no weight")
            return HeadModules(decoder.embedding, decoder.norm, head, processor)
        if not path:
            raise LookupError(f"{type(model).__name__} has no logits_processor")
        path = path.rpartition(".")[0]


def effective_norm(norm: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """(factor float32 [H], eps) of a final RMSNorm, w or 1 + w, whichever gives its own output;
    LookupError where neither does.

    dtype: in which the verifier computes. Two of the rows tried are so small that eps counts.
    """
    name, weight = type(norm).__name__, getattr(norm, "weight", None)
    eps = next((getattr(norm, k) for k in ("variance_epsilon", "eps") if hasattr(norm, k)), None)
    if weight is None or weight.dim() != 1 or eps is None:
        raise LookupError(f"its final norm {name} has no weight [H] or no eps")
    if getattr(norm, "bias", None) is not None:
        raise LookupError(f"its final norm {name} has a bias: it is a LayerNorm")
    generator = torch.Generator().manual_seed(0)
    x_NH = torch.randn(4, len(weight), generator=generator) + 0.5
    x_NH[2:] *= float(eps) ** 0.5
    x_NH = x_NH.to(weight.device, dtype)
    theirs_NH = norm(x_NH.clone())
    weight = weight.detach().float()
    for factor in (weight, 1 + weight):
        ours_NH = rms_norm(x_NH, factor, float(eps)).float()
        difference_N = (ours_NH - theirs_NH.float()).norm(dim=-1) / ours_NH.norm(dim=-1)
        if bool((difference_N < NORM_GATE).all()):
            return factor, float(eps)
    raise LookupError(f"its final norm {name} is neither RMSNorm with w nor with 1 + w")


def rows_of(module: Any, vocab_size: int) -> VocabularyShare:
    """The rows of a vocabulary's tensor that this rank holds, without padding."""
    share = getattr(module, "shard_indices", None)
    if share is None:
        return VocabularyShare(0, min(vocab_size, len(module.weight)))
    last = min(share.org_vocab_end_index, vocab_size)
    return VocabularyShare(min(share.org_vocab_start_index, last), last)


def write_rows(file: int, begin: int, module: nn.Module, name: str, vocab_size: int) -> None:
    """Write a rank's rows of a tensor that begins at byte `begin`."""
    tensor, rows = getattr(module, name), rows_of(module, vocab_size)
    row_bytes, first = tensor[0].numel() * tensor.itemsize, rows.first
    for part in tensor[: rows.last - rows.first].split(ROWS_AT_ONCE):
        data = part.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
        os.pwrite(file, data, begin + first * row_bytes)
        first += len(part)
