"""A verifier's weight files, checked by their headers before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.manifest import recorded
from common.tensor_files import FLOATS, TensorPlace, read_header
from common.verifier.config import Verifier
from common.verifier.files import model_file, optional_file, read_object, weight_map
from common.verifier.fingerprint import verifier_hashes
from common.verifier.tensors import find_modules, in_layer

# Families whose key projection has the plain shape.
PLAIN_ATTENTION = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
STORED_AS = {
    "I8": "int8", "U8": "uint8", "I32": "int32",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
CALLED = {"embed_tokens": "embedding", "lm_head": "output head", "norm": "final norm"}


@dataclass(frozen=True)
class Weights:
    size: int  # of all tensors; 0 where unknown
    files: int
    absent: list[str]  # files that are not in the folder
    here: bool  # whether all lie in a local folder (a hub name's do not, to be read cheaply)


def check_weights(verifier: Verifier, model_impl: str = "auto") -> Weights:
    """Size and presence of the weights' files; UserError where one is cut short.

    A hub name's files are taken as present: `identities` has them downloaded.
    """
    where = weight_map(verifier.path)
    names = sorted(set(where.values()))
    check_biases(verifier, where, model_impl)
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
    return verifier_hashes(verifier)


def check_biases(verifier: Verifier, where: dict[str, str], model_impl: str) -> None:
    """UserError where the final norm has a bias (it is a LayerNorm then), or the output head one
    that vLLM's own classes do not apply.

    Args:
        model_impl: vLLM's; its Transformers backend applies a head's bias.
    """
    modules = find_modules(verifier, where)
    for name, why in (
        ("norm", "is a LayerNorm's, a draft's targets are made with an RMSNorm; choose a verifier"
         " that ends in one"),
        ("lm_head", "is not applied by vLLM's own classes, so a server would not answer as this"
         """ model does; pass --engine-args '{"model_impl": "transformers"}'"""),
    ):  # fmt: skip
        bias = f"{modules.get(name, '')}.bias"
        if bias in where and not (name == "lm_head" and model_impl == "transformers"):
            raise UserError(f"{Path(verifier.path) / where[bias]}: {bias} {why}")


def check_stored(verifier: Verifier, dry_run: bool) -> None:
    """UserError where embedding or head are stored quantised: by the files' headers, or by the
    names in the index where the files are not here (a hub name's are fetched for a run)."""
    where = weight_map(verifier.path)
    for name, module in find_modules(verifier, where).items():
        weight, stored = f"{module}.weight", [k for k in where if k.startswith(f"{module}.")]
        key = weight if weight in where else min(stored)
        path = Path(verifier.path) / where[key]
        if not dry_run and not path.parent.is_dir():
            path = model_file(verifier.path, where[key])
        place = read_header(path).get(key) if path.is_file() else None
        more = sorted(k for k in stored if k not in (key, f"{module}.bias"))
        if key == weight and (place.dtype in FLOATS if place else not more):
            continue
        raise UserError(
            f"{path}: the {CALLED[name]} is stored quantised, as {key}"
            + (f" in {STORED_AS.get(place.dtype, place.dtype)} {place.shape}" if place else "")
            + (f" with {', '.join(more)}" if more else "")
            + f"; use weights with the {CALLED[name]} in bfloat16, float16 or float32"
        )


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
    V, H = verifier.vocab_size, verifier.hidden_size
    modules = find_modules(verifier, where)
    want = {f"{modules.get('norm')}.weight": [H]}
    want |= {f"{m}.weight": [V, H] for name, m in modules.items() if name != "norm"}
    if "embed_tokens" in modules:
        inside = modules["embed_tokens"].rpartition(".")[0]
        layers = f"{inside}.layers." if inside else "layers."
        check_depth(verifier, where, layers)
        want |= key_projection(verifier, layers)
        others = {k for k, place in tensors.items() if place.shape == [V, H] and not in_layer(k)}
        if "lm_head" not in modules and not others - want.keys():
            raise UserError(
                f"{verifier.path}: its weights have no output head (lm_head.weight), and"
                " config.json's tie_word_embeddings is false; finish the download or correct it"
            )
    for key, shape in want.items():
        found = tensors.get(key)
        if found and found.dtype in FLOATS and found.shape != shape:
            raise UserError(
                f"{Path(verifier.path) / where[key]}: {key} is {found.shape}, config.json asks for"
                f" {shape}, and vLLM loads no other; are both of one model?"
            )


def check_depth(verifier: Verifier, where: dict[str, str], layers: str) -> None:
    """UserError where the weights have another number of layers than config.json says.

    `layers`: what their tensors' names begin with.
    """
    text = verifier.text
    numbers = {int(k.removeprefix(layers).split(".")[0]) for k in where if k.startswith(layers)}
    extra = int(text.get("num_nextn_predict_layers") or text.get("num_mtp_modules") or 0)
    if numbers and not verifier.num_layers - 1 <= max(numbers) < verifier.num_layers + extra:
        raise UserError(
            f"{verifier.path}: config.json says num_hidden_layers {verifier.num_layers}, the"
            f" weights have layers 0 to {max(numbers)}"
        )


def key_projection(verifier: Verifier, layers: str) -> dict[str, list[int]]:
    """Name and shape of the first layer's key projection, in families where it is plain."""
    H, t = verifier.hidden_size, verifier.text
    heads = t.get("num_attention_heads")
    if not heads or t.get("model_type") not in PLAIN_ATTENTION:
        return {}
    kv_heads, dim = t.get("num_key_value_heads") or heads, t.get("head_dim") or H // heads
    return {f"{layers}0.self_attn.k_proj.weight": [kv_heads * dim, H]}


def require_weights(verifier: Verifier, weights: Weights) -> None:
    if weights.absent:
        raise UserError(
            f"{verifier.path}: {len(weights.absent)} of {weights.files} weight files are not there"
            f" ({weights.absent[0]}...); finish the download"
        )
