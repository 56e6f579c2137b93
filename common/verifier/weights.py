"""A verifier's weight files, checked by their headers before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.manifest import recorded
from common.tensor_files import TensorPlace, read_header
from common.verifier.config import Verifier
from common.verifier.files import optional_file, read_object, weight_map
from common.verifier.fingerprint import fingerprint, weights_fingerprint
from common.verifier.tensors import tensor_key

# Families whose key projection has the plain shape.
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Weights:
    size: int  # of all tensors; 0 where unknown
    files: int
    absent: list[str]  # files that are not in the folder
    here: bool  # whether all lie in a local folder (a hub name's do not, to be read cheaply)


def check_weights(verifier: Verifier) -> Weights:
    """Size and presence of the weights' files; UserError where one is cut short.

    A hub name's files are taken as present: `identities` has them downloaded.
    """
    where = weight_map(verifier.path)
    names = sorted(set(where.values()))
    folder = Path(verifier.path)
    absent = [n for n in names if folder.is_dir() and not (folder / n).is_file()]
    size = 0
    index = optional_file(verifier.path, "model.safetensors.index.json")
    if index is not None:
        total = (read_object(index).get("metadata") or {}).get("total_size")
        size = int(total) if isinstance(total, int | float) else 0
    if folder.is_dir():
        there = [n for n in names if n not in absent]
        tensors: dict[str, TensorPlace] = {}
        for name in there:
            header = read_header(folder / name)
            tensors |= {k: v for k, v in header.items() if where.get(k) == name}
        size = size or sum((folder / n).stat().st_size for n in there)
        if not absent:
            check_shapes(verifier, where, tensors)
    return Weights(size, len(names), absent, folder.is_dir() and not absent)


def identities(verifier: Verifier, weights: Weights, out: Path, dry_run: bool) -> dict[str, str]:
    """What a manifest calls `verifier` and `verifier_weights`; UserError where weights are missing.

    In a dry run they may be: then what the manifest in `out`, if any, has for them.
    """
    if dry_run and not weights.here:
        return {
            name: recorded(out, "inputs", name) or "" for name in ("verifier", "verifier_weights")
        }
    require_weights(verifier, weights)
    return {"verifier": fingerprint(verifier), "verifier_weights": weights_fingerprint(verifier)}


def check_shapes(
    verifier: Verifier, where: dict[str, str], tensors: dict[str, TensorPlace]
) -> None:
    """UserError where the weights' files are not what the index and config.json promise.

    Args:
        where: tensor name → file, of the index.
        tensors: tensor name → its place, of the files' headers.
    """
    odd = sorted(where.keys() - tensors.keys())
    if odd:
        raise UserError(
            f"{Path(verifier.path) / where[odd[0]]}: has no {odd[0]}, which the index puts there;"
            " download both again"
        )
    V, H, t = verifier.vocab_size, verifier.hidden_size, verifier.text
    embedding = tensor_key(verifier, where, "embed_tokens")
    want = {tensor_key(verifier, where, "norm"): [H], embedding: [V, H]}
    want[tensor_key(verifier, where, "lm_head")] = [V, H]
    layers = embedding.removesuffix("embed_tokens.weight") + "layers."
    numbers = {int(k.removeprefix(layers).split(".")[0]) for k in where if k.startswith(layers)}
    extra = int(t.get("num_nextn_predict_layers") or 0)
    if numbers and not verifier.num_layers - 1 <= max(numbers) < verifier.num_layers + extra:
        raise UserError(
            f"{verifier.path}: config.json says num_hidden_layers {verifier.num_layers}, the"
            f" weights have layers 0 to {max(numbers)}"
        )
    heads = t.get("num_attention_heads")
    if heads and t.get("model_type") in PLAIN_ATTENTION:
        kv_heads, dim = t.get("num_key_value_heads") or heads, t.get("head_dim") or H // heads
        want[f"{layers}0.self_attn.k_proj.weight"] = [kv_heads * dim, H]
    for key, shape in want.items():
        found = tensors[key]
        if found.dtype in FLOATS and found.shape != shape:
            raise UserError(
                f"{Path(verifier.path) / where[key]}: {key} is {found.shape}, config.json asks for"
                f" {shape}; are both of one model?"
            )


def require_weights(verifier: Verifier, weights: Weights) -> None:
    if weights.absent:
        raise UserError(
            f"{verifier.path}: {len(weights.absent)} of {weights.files} weight files are not there"
            f" ({weights.absent[0]}...); finish the download"
        )
