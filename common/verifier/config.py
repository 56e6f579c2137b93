"""What the pipeline needs to know of a verifier, read from its files without loading it.

Reads config.json (text part of multimodal wrappers unwrapped), the end-of-turn ids, and
the three tensors the draft needs: embedding, head, final norm. Nothing here imports
torch or transformers until a tensor is read.
"""

import hashlib
import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.artifacts import decode_json, sha256_file, sha256_json
from common.errors import UserError

if TYPE_CHECKING:
    import torch

# Suffixes of the tensors' names; the shortest matching name wins, so that
# `language_model.model.norm.weight` is found and layer norms are not.
TENSORS = {
    "embed_tokens": ("embed_tokens.weight",),
    "lm_head": ("lm_head.weight", "output.weight"),
    "norm": ("model.norm.weight",),
}


NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
COUNTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Verifier:
    """A verifier's identity and shape. `text` is the language model's part of config.json."""

    path: str
    config: dict[str, Any]
    text: dict[str, Any]
    num_layers: int
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    end_ids: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["?"])[0]

    def default_layers(self) -> list[int]:
        """Layers 2, n//2, n-3 and n-1 (2/30/58/60 for 61): three aux layers and the last."""
        n = self.num_layers
        return sorted({min(2, n - 1), n // 2, max(n - 3, 0), n - 1})

    def longest_sample(self, max_seq_len: int) -> int:
        """Most tokens of a sample: one more, which vLLM adds, has to fit into its positions."""
        return min(max_seq_len, (self.max_positions or 2**31) - 1)


def load_verifier(model_path: str) -> Verifier:
    """Read a verifier's config.json (and generation_config.json where there is one)."""
    config_file = model_file(model_path, "config.json")
    config = read_object(config_file)
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UserError(f"{config_file}: text_config is no JSON object; download the file again")
    eps = text.get("rms_norm_eps")
    need = {}
    for key in NEEDED:
        if text.get(key) is None:
            raise UserError(f"{config_file}: no {key}; is {model_path} a language model?")
        need[key] = text[key]
    for key in (*NEEDED, *COUNTS):
        value = text.get(key)
        if value is not None and (not isinstance(value, int) or value < (key in NEEDED)):
            raise UserError(f"{config_file}: {key} is {value!r}; download the file again")
    if eps is None:
        raise UserError(f"{config_file}: no rms_norm_eps; only verifiers with RMSNorm are known")
    if not isinstance(eps, float | int):
        raise UserError(f"{config_file}: rms_norm_eps is {eps!r}; download the file again")
    return Verifier(
        path=model_path,
        config=config,
        text=text,
        num_layers=need["num_hidden_layers"],
        hidden_size=need["hidden_size"],
        vocab_size=need["vocab_size"],
        rms_norm_eps=float(eps),
        max_positions=int(text.get("max_position_embeddings") or 0),
        end_ids=end_ids(model_path, config, text),
    )


def end_ids(model_path: str, config: dict, text: dict) -> tuple[int, ...]:
    """Ids at which the verifier stops: eos of config.json and of generation_config.json."""
    found: set[int] = set()
    sources = [config, text]
    path = optional_file(model_path, "generation_config.json")
    if path is not None:
        sources.append(read_object(path))
    for source in sources:
        eos = source.get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(i, int) for i in ids):
            raise UserError(f"{model_path}: eos_token_id is {eos!r}, expected ids")
        found.update(ids)
    return tuple(sorted(found))


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of the verifier's; UserError naming the file."""
    try:
        found = decode_json(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UserError(f"{path}: not JSON ({e}); download the file again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object; download the file again")
    return found


# ---------------------------------------------------------------- files


def model_file(model_path: str, name: str) -> Path:
    """Path of a verifier's file: in its folder, or fetched from the hub by name."""
    folder = Path(model_path)
    if folder.is_dir():
        path = folder / name
        if not path.is_file():
            raise UserError(f"--model-path {model_path}: has no {name}")
        return path
    if folder.exists() or model_path.count("/") != 1 or model_path.startswith((".", "/", "~")):
        raise UserError(f"--model-path {model_path}: no such folder")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model_path, name))
    except Exception as e:  # a dozen hub and network errors, one remedy
        raise UserError(
            f"--model-path {model_path}: no such folder, and {name} could not be fetched from the"
            f" hub ({type(e).__name__}); download the model and pass its folder"
        ) from None


def optional_file(model_path: str, name: str) -> Path | None:
    """As `model_file`, or None where the verifier does not ship that file."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return model_file(model_path, name)
    except UserError:
        return None


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tiktoken.model",
    "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip


def tokenizer_fingerprint(model_path: str) -> str:
    """Hash of the files that decide ids and template, so that another tokenizer is noticed."""
    names = list(TOKENIZER_FILES)
    config = optional_file(model_path, "tokenizer_config.json")
    if config is not None:  # code that ships with the model: "module.Class", or None
        for value in (read_object(config).get("auto_map") or {}).values():
            for name in value if isinstance(value, list) else [value]:
                names += [f"{name.split('.')[0]}.py"] if isinstance(name, str) else []
    found = {n: optional_file(model_path, n) for n in names}
    return sha256_json({n: sha256_file(p) for n, p in found.items() if p})


def weight_map(model_path: str) -> dict[str, str]:
    """Tensor name → safetensors file name, from the index or from the single file."""
    index = optional_file(model_path, "model.safetensors.index.json")
    if index is not None:
        found = read_object(index).get("weight_map")
        if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
            raise UserError(f"{index}: has no weight_map; download the file again")
        return found
    path = model_file(model_path, "model.safetensors")
    return {k: path.name for k in safetensors_header(path) if k != "__metadata__"}


def safetensors_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file; UserError when the file is shorter than it promises."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            if n > size - 8:
                raise ValueError("truncated header")
            header = decode_json(f.read(n))
        ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        if 8 + n + max(ends, default=0) != size:
            raise ValueError(f"{size} bytes, its header promises {8 + n + max(ends, default=0)}")
    except (ValueError, KeyError, TypeError, struct.error) as e:
        raise UserError(f"{path}: not a whole safetensors file ({e}); make it again") from None
    return header


# ---------------------------------------------------------------- tensors


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
        if key not in safetensors_header(path):
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


# Parts of config.json that do not change what a verifier computes. (03 notes its dtype itself.)
INCIDENTAL = (
    "_name_or_path", "transformers_version", "architectures", "auto_map", "use_cache", "dtype",
    "torch_dtype", "_attn_implementation",
)  # fmt: skip
SAMPLE_BYTES = 4096


def fingerprint(verifier: Verifier) -> str:
    """Identity of a verifier by content, the same for a copy in another folder.

    Hashes the language model's config, the names of its tensors, and SAMPLE_BYTES from the
    middle of embedding, head and final norm, whose files 04 has. What a merged adapter changes
    beside them, `weights_fingerprint` sees.
    """
    where = weight_map(verifier.path)
    text = {k: v for k, v in verifier.text.items() if k not in INCIDENTAL}
    quantization = verifier.config.get("quantization_config")
    known = [verifier.architecture, text, quantization, sorted(where)]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    add_samples(digest, verifier, where, [tensor_key(verifier, where, name) for name in TENSORS])
    return digest.hexdigest()


def weights_fingerprint(verifier: Verifier) -> str:
    """Hash of SAMPLE_BYTES from every tensor but numbered experts after the first: what a
    fine-tune, a merged adapter or another quantization changes. For stages that load the
    verifier; Kimi-K2.5's files are read at some 1,500 places.
    """
    where = weight_map(verifier.path)
    keys = []
    for key in sorted(where):
        expert = re.search(r"\.experts\.(\d+)\.", key)
        if expert is None or int(expert[1]) == 0:
            keys.append(key)
    digest = hashlib.sha256()
    add_samples(digest, verifier, where, keys)
    return digest.hexdigest()


def add_samples(digest: Any, verifier: Verifier, where: dict[str, str], keys: list[str]) -> None:
    """Hash a piece from the middle of each tensor, file by file."""
    files: dict[str, list[str]] = {}
    for key in keys:
        files.setdefault(where[key], []).append(key)
    for name, held in sorted(files.items()):
        path = model_file(verifier.path, name)
        header = safetensors_header(path)
        with open(path, "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            for key in sorted(held):
                if key not in header:
                    raise UserError(f"{path}: has no {key}, which the index puts there")
                begin, end = header[key]["data_offsets"]
                f.seek(8 + n + max(begin, (begin + end - SAMPLE_BYTES) // 2))
                digest.update(f.read(min(end - begin, SAMPLE_BYTES)))
