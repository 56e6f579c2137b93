"""Whether vLLM can serve a draft checkpoint for a verifier, checked before anything loads."""

from pathlib import Path

from common.artifacts import read_json
from common.errors import UserError
from common.tensor_files import read_header
from common.verifier.config import Verifier


def check_draft(folder: Path, verifier: Verifier) -> None:
    """UserError unless the checkpoint is complete and of this verifier's shape."""
    config = read_json(folder / "config.json")
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{folder}: has no model.safetensors; run 04_train.py to its end")
    header = read_header(folder / "model.safetensors")
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, dict) or "fc.weight" not in header:
        raise UserError(f"{folder}: is not an EAGLE-3 draft (no fc.weight, or a damaged config)")
    for key, ours in (("hidden_size", verifier.hidden_size), ("vocab_size", verifier.vocab_size)):
        if layer.get(key) != ours:
            raise UserError(
                f"{folder}: was trained for a verifier with {key} {layer.get(key)},"
                f" {verifier.path} has {ours}"
            )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        raise UserError(
            f"{folder}/config.json: has no eagle_aux_hidden_state_layer_ids; a server would"
            " silently take other layers than it was trained on"
        )
    if header["fc.weight"].shape[1] != len(ids) * verifier.hidden_size:
        raise UserError(f"{folder}: fc.weight does not fit {len(ids)} aux layers")
    missing = [k for k in ("num_attention_heads", "rms_norm_eps") if k not in layer]
    if missing:
        raise UserError(f"{folder}/config.json: has no {missing[0]}; is the file complete?")
    # a server would fill a head or map that is not there with zeros, silently
    rows = config.get("draft_vocab_size") or verifier.vocab_size
    shapes = {name: place.shape for name, place in header.items()}
    if shapes.get("lm_head.weight") != [rows, verifier.hidden_size]:
        raise UserError(f"{folder}: has no lm_head.weight of {rows} tokens; is it complete?")
    if rows < verifier.vocab_size and shapes.get("d2t") != [rows]:
        raise UserError(f"{folder}: has no d2t of {rows} tokens; is it complete?")
