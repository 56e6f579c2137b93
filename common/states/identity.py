"""Whether a draft, the states for its parity and the verifier that serves it belong together."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.manifest import MANIFEST, must_match, read_manifest
from common.states.folder import HiddenFolder
from common.verifier.config import Verifier
from common.verifier.head import read_head_manifest

REMEDY = (
    "pass the --model-path that it was made with; a quantised copy of that verifier goes with"
    " --quantized-copy"
)
TOKENIZER = "the same tokenizer's files must lie beside the weights, copy them from the verifier"


@dataclass(frozen=True)
class MadeWith:
    """The verifier that a draft or states were made with, as far as their manifest says.

    hashes: `verifier`, `verifier_weights` and `tokenizer`; num_layers: of the verifier.
    """

    folder: Path
    hashes: dict[str, str]
    num_layers: int
    hidden_size: int


def draft_made_with(draft: Path) -> MadeWith | None:
    """None for a draft from elsewhere."""
    if not (draft / MANIFEST).exists():
        return None
    found = read_manifest(draft, "train")
    hashes = found.stage.inputs | (found.more.get("trained_on") or {})
    settings = found.stage.settings
    return MadeWith(draft, hashes, settings["layers"][-1] + 1, settings["draft"]["hidden_size"])


def states_made_with(hidden: HiddenFolder) -> MadeWith:
    head = read_head_manifest(hidden.head_folder)
    hashes = hidden.inputs | ({"tokenizer": head.tokenizer} if head else {})
    return MadeWith(hidden.path, hashes, hidden.layers[-1] + 1, hidden.settings["hidden_size"])


def check_made_with(
    made: MadeWith, verifier: Verifier, found: dict[str, str], quantized_copy: bool
) -> None:
    """UserError unless it was made with this verifier, or one of its layers, size and tokenizer.

    Args:
        found: the hashes of this verifier, those that are known.
    """
    here = Path(verifier.path)
    for name in ("tokenizer",) if quantized_copy else ("verifier", "verifier_weights", "tokenizer"):
        remedy = TOKENIZER if name == "tokenizer" else REMEDY
        if made.hashes.get(name) and found.get(name):
            must_match(name, made.folder, made.hashes[name], here, found[name], remedy)
    for key in ("num_layers", "hidden_size"):
        if getattr(made, key) != getattr(verifier, key):
            raise UserError(
                f"{made.folder}: was made with a verifier of {key} {getattr(made, key)},"
                f" {verifier.path} has {getattr(verifier, key)}; that is no copy of it"
            )
