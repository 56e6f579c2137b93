"""The verifier's head: what makes next-token distributions of its last layer's states, and the
embedding beside it, as the verifier that vLLM has loaded computes with them.

03 writes it once beside the states, 04 and the self-check read it and know no tensor names:

    verifier_head.safetensors   embed_tokens [V, H] and, unless tied, lm_head [V, H], in the dtype
                                that vLLM computes in; lm_head_bias [V] where there is one;
                                norm [H] float32, the factor that the normed states are multiplied
                                by (1 + w for a Gemma norm)
    verifier_head.json          HeadManifest, written last: with it the file is complete, and proven
                                where logprob_difference is not None

Shape suffixes: T tokens of a sample, N rows, H hidden size, V vocabulary, X part of it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from common.artifacts import read_json, write_json
from common.errors import UserError
from common.tensor_files import DTYPES, file_checksum, read_header
from common.verifier.config import Verifier, make_verifier

HEAD_FILE = "verifier_head.safetensors"
HEAD_MANIFEST = "verifier_head.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class HeadFacts:
    """What is beside the tensors: logits = logit_scale * cap(lm_head(norm(h)) + bias), where cap(x)
    is soft_cap * tanh(x / soft_cap) if there is one, in this order as vLLM's LogitsProcessor.

    dtype: of embedding and head; tied: the head is the embedding; norm_kind: "rms", the only one
    known; embedding_scale: what enters layer 0 is embedding_scale times the embedding's row (None
    where it was not measured; a draft gets the row itself, as a server feeds it).
    """

    dtype: str
    tied: bool
    norm_eps: float
    norm_kind: str = "rms"
    logit_scale: float = 1.0
    soft_cap: float | None = None
    embedding_scale: float | None = None


@dataclass(frozen=True)
class HeadManifest:
    """verifier_head.json: whose head it is, and what 04 needs of that verifier.

    name: the verifier's absolute path or hub name, for the checkpoint; config: its config.json;
    end_ids: where it stops; tokenizer, verifier, verifier_weights: identities, see fingerprint.py;
    checksum: xxh3_128 of HEAD_FILE; logprob_difference: the mean of the self-check, None where no
    sample had two tokens.
    """

    name: str
    config: dict[str, Any]
    end_ids: list[int]
    tokenizer: str
    verifier: str
    verifier_weights: str
    facts: HeadFacts
    checksum: str
    logprob_difference: float | None

    def make_verifier(self, folder: Path) -> Verifier:
        """The verifier of the states in `folder`; opens none of its files."""
        return make_verifier(self.name, self.config, tuple(self.end_ids), folder / HEAD_MANIFEST)

    def write(self, folder: Path) -> None:
        write_json(folder / HEAD_MANIFEST, {"format_version": FORMAT_VERSION, **asdict(self)})


def read_head_manifest(folder: Path) -> HeadManifest | None:
    """The manifest of the head beside a folder's states; None without one, UserError where it is
    damaged or its file is not complete."""
    path = folder / HEAD_MANIFEST
    if not path.exists():
        return None
    try:
        manifest = parse_manifest(read_json(path))
        header = read_header(folder / HEAD_FILE)
        verifier, bias = manifest.make_verifier(folder), "lm_head_bias" in header
        for name, (_, shape) in head_tensors(verifier, manifest.facts, bias).items():
            if name not in header or header[name].shape != shape:
                raise ValueError(f"{HEAD_FILE} has no {name} of {shape}")
    except FileNotFoundError:
        raise UserError(
            f"{folder / HEAD_FILE}: missing; delete {path} and run 03's command again"
        ) from None
    except (UserError, OSError, AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(
            f"{path}: is damaged, or its file ({e}); delete it and run 03's command again, which"
            " writes both without extracting again"
        ) from None
    return manifest


KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,), "config": (dict,), "end_ids": (list,), "tokenizer": (str,), "verifier": (str,),
    "verifier_weights": (str,), "facts": (dict,), "checksum": (str,), "dtype": (str,),
    "tied": (bool,), "norm_eps": (float, int), "logit_scale": (float, int),
    "soft_cap": (float, int, NoneType), "norm_kind": (str,),
}  # fmt: skip


def parse_manifest(found: dict[str, Any]) -> HeadManifest:
    """verifier_head.json's content; KeyError, TypeError or ValueError where it is not that."""
    if found.pop("format_version") != FORMAT_VERSION:
        raise ValueError("of another version")
    for key, value in (found | found["facts"]).items():
        if not isinstance(value, KINDS.get(key, object)):
            raise ValueError(f"{key} is {value!r}")
    manifest = HeadManifest(**found | {"facts": HeadFacts(**found["facts"])})
    if manifest.facts.norm_kind != "rms" or manifest.facts.dtype not in DTYPES:
        raise ValueError(f"norm {manifest.facts.norm_kind}, dtype {manifest.facts.dtype}")
    return manifest


def head_tensors(
    verifier: Verifier, facts: HeadFacts, bias: bool
) -> dict[str, tuple[str, list[int]]]:
    """The file's tensors: name → (dtype as safetensors names it, shape), in the file's order."""
    kind, V, H = DTYPES[facts.dtype], verifier.vocab_size, verifier.hidden_size
    found: dict[str, tuple[str, list[int]]] = {"norm": ("F32", [H]), "embed_tokens": (kind, [V, H])}
    if not facts.tied:
        found["lm_head"] = (kind, [V, H])
    return found | ({"lm_head_bias": (kind, [V])} if bias else {})


def check_head_bytes(folder: Path, manifest: HeadManifest) -> None:
    """UserError unless the file's bytes are those written."""
    if file_checksum(folder / HEAD_FILE) != manifest.checksum:
        raise UserError(
            f"{folder / HEAD_FILE}: its bytes are not those written; delete"
            f" {folder / HEAD_MANIFEST} and run 03's command again"
        )
