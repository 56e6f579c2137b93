"""The three tensors of a verifier that the draft needs: embedding, head, final norm."""

from typing import TYPE_CHECKING

from common.errors import UserError
from common.tensor_files import read_header
from common.verifier.config import Verifier
from common.verifier.files import model_file, weight_map

if TYPE_CHECKING:
    import torch

# Suffixes of the tensors' names; the shortest matching name wins, so that
# `language_model.model.norm.weight` is found and layer norms are not.
TENSORS = {
    "embed_tokens": ("embed_tokens.weight",),
    "lm_head": ("lm_head.weight", "output.weight"),
    "norm": ("model.norm.weight",),
}


def read_tensors(verifier: Verifier, names: tuple[str, ...]) -> "dict[str, torch.Tensor]":
    """Read some of embed_tokens [V, H], lm_head [V, H], norm [H], in the file's dtype.

    A head tied to the embedding is the embedding. Only the shards that hold them are opened.
    """
    from safetensors import safe_open

    where = weight_map(verifier.path)
    out = {}
    for name in names:
        key = tensor_key(verifier, where, name)
        path = model_file(verifier.path, where[key])
        if key not in read_header(path):
            raise UserError(
                f"{path}: has no {key}, which the index puts there; download both again"
            )
        with safe_open(path, framework="pt") as f:
            out[name] = f.get_tensor(key)
    for name, tensor in out.items():
        shape = (
            (verifier.hidden_size,)
            if name == "norm"
            else (verifier.vocab_size, verifier.hidden_size)
        )
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise UserError(
                f"{verifier.path}: {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape}"
                " in floating point"
            )
    return out


def tensor_key(verifier: Verifier, where: dict[str, str], name: str) -> str:
    """Full name of embed_tokens, lm_head or norm; a tied head is the embedding."""
    keys = [k for s in TENSORS[name] for k in where if k == s or k.endswith("." + s)]
    if not keys and name == "lm_head" and tied(verifier):
        keys = [k for k in where if k.endswith("embed_tokens.weight")]
    if not keys:
        raise UserError(f"{verifier.path}: no tensor named *{TENSORS[name][0]} in its weights")
    return min(keys, key=len)


def tied(verifier: Verifier) -> bool:
    value = verifier.text.get("tie_word_embeddings", verifier.config.get("tie_word_embeddings"))
    return True if value is None else bool(value)  # transformers' default is True
