"""Which verifier it is: hashes of its content, the same for a copy in another folder."""

import hashlib
import json
import re
from typing import Any

from common.artifacts import sha256_file, sha256_json
from common.errors import UserError
from common.tensor_files import read_header
from common.verifier.config import Verifier
from common.verifier.files import model_file, optional_file, read_object, weight_map
from common.verifier.tensors import TENSORS, find_modules

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


# Parts of config.json that do not change what a verifier computes. (03 notes its dtype itself.)
INCIDENTAL = (
    "_name_or_path", "transformers_version", "architectures", "auto_map", "use_cache", "dtype",
    "torch_dtype", "_attn_implementation",
)  # fmt: skip
SAMPLE_BYTES = 4096


def fingerprint(verifier: Verifier) -> str:
    """Identity of a verifier by content, the same for a copy in another folder.

    Hashes the language model's config, the names of its tensors, and SAMPLE_BYTES from the
    middle of embedding, head and final norm, of those whose names are known. What a merged
    adapter changes beside them, `weights_fingerprint` sees.
    """
    where = weight_map(verifier.path)
    text = {k: v for k, v in verifier.text.items() if k not in INCIDENTAL}
    quantization = verifier.config.get("quantization_config")
    known = [verifier.architecture, text, quantization, sorted(where)]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    modules = find_modules(verifier, where)
    keys = [f"{modules[name]}.weight" for name in TENSORS if name in modules]
    add_samples(digest, verifier, where, [key for key in keys if key in where])
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
    for name, names in sorted(files.items()):
        path = model_file(verifier.path, name)
        places = read_header(path)
        with open(path, "rb") as f:
            for key in sorted(names):
                if key not in places:
                    raise UserError(f"{path}: has no {key}, which the index puts there")
                begin, end = places[key].begin, places[key].end
                f.seek(max(begin, (begin + end - SAMPLE_BYTES) // 2))
                digest.update(f.read(min(end - begin, SAMPLE_BYTES)))


def verifier_hashes(verifier: Verifier) -> dict[str, str]:
    """What manifests call `verifier` and `verifier_weights`."""
    return {"verifier": fingerprint(verifier), "verifier_weights": weights_fingerprint(verifier)}


def hashes_of(verifier: Verifier) -> dict[str, str]:
    """`verifier`, `verifier_weights` and `tokenizer`, by which two are known to be the same."""
    return {
        **verifier_hashes(verifier),
        "tokenizer": tokenizer_fingerprint(verifier.path),
    }
