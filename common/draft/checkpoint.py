"""A draft's checkpoint: reading all of it, and starting from one, whatever vocabulary map it was
made with.

Reads speculators' format and plain EAGLE-3 checkpoints (LlamaForCausalLMEagle3, whose layer may
be called `midlayer`), safetensors only.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.artifacts import read_json
from common.draft.config import SHAPE_KEYS, DraftShape
from common.draft.model import Eagle3Draft
from common.errors import UserError
from common.tensor_files import read_header

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ROPE_THETA = 10000.0  # where a config says none, as transformers reads it
NOT_TRAINED = ("embed_tokens.weight", "d2t", "t2d")


def parameter_name(name: str) -> str:
    """A checkpoint tensor's name in this project."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, by their names in this project."""
    return {parameter_name(k): v for k, v in load_file(folder / "model.safetensors").items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json, flat: the layer's keys, those of NORMS, `plain_rope`, and `aux_ids`, the
    layers of the speculators format (plain checkpoints count them in more than one way)."""
    config = read_json(folder / "config.json")
    speculators = "transformer_layer_config" in config
    layer: dict[str, Any] = config.get("transformer_layer_config") or config
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    # what an absent key means differs between the formats (vLLM reads them so)
    default = {"norm_before_residual": speculators}
    norms = {key: bool(config.get(key, default.get(key, False))) for key in NORMS}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    aux_ids = config.get("eagle_aux_hidden_state_layer_ids") if speculators else None
    more = {"plain_rope": plain, "aux_ids": aux_ids}
    return {"rope_theta": ROPE_THETA} | layer | rope | norms | more


def check_initial(folder: Path, shape: DraftShape, aux_ids: list[int]) -> None:
    """UserError unless the checkpoint is a draft of this very architecture, by its config.json
    and its file's header, and of these layers, as a server counts them."""
    layer = read_config(folder)
    if not layer["plain_rope"]:
        raise UserError(
            f"--init-from {folder}: its rotary embedding is scaled, this draft's is not; start from"
            " another draft, or from none"
        )
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"--init-from {folder}: has no model.safetensors; convert the draft to it")
    sizes = {parameter_name(name): place.shape for name, place in read_header(file).items()}
    for key in NORMS:
        if layer[key] != getattr(shape, key):
            flag = "--" + ("" if layer[key] else "no-") + key.replace("_", "-")
            raise UserError(f"--init-from {folder}: its {key} is {layer[key]}; pass {flag}")
    for key in (*SHAPE_KEYS, "vocab_size"):
        if key in layer and layer[key] != getattr(shape, key):
            raise UserError(
                f"--init-from {folder}: its {key} is {layer[key]}, this draft's is"
                f" {getattr(shape, key)}; "
                + ("it is of another verifier" if key == "vocab_size" else "see --draft-shape")
            )
    if layer["aux_ids"] and list(layer["aux_ids"]) != aux_ids:
        raise UserError(
            f"--init-from {folder}: it was trained on the layers that a server calls"
            f" {layer['aux_ids']}, these states are of {aux_ids}; start from another draft, or run"
            " 03 with its --layers"
        )
    check_sizes(folder, sizes, shape)


def check_sizes(folder: Path, sizes: dict[str, list[int]], shape: DraftShape) -> None:
    """UserError unless the checkpoint's tensors, of these sizes, are those of the shape; its head
    may be of another draft vocabulary."""
    with torch.device("meta"):
        expected = {k: list(v.shape) for k, v in Eagle3Draft(shape).named_parameters()}
    expected["lm_head.weight"] = [sizes.get("lm_head.weight", [0])[0], shape.hidden_size]
    for name in sorted((sizes.keys() | expected.keys()) - set(NOT_TRAINED)):
        if sizes.get(name) != expected.get(name):
            raise UserError(
                f"--init-from {folder}: {name} is {sizes.get(name, 'missing')}, this draft's is"
                f" {expected.get(name, 'none')}; start from a draft of the same shape and flags"
            )
    if "d2t" not in sizes and sizes["lm_head.weight"][0] != shape.vocab_size:
        raise UserError(
            f"--init-from {folder}: has no d2t, so nothing says which tokens its lm_head is of;"
            " start from another draft, or from none"
        )


@torch.no_grad()
def initialize_from(folder: Path, draft: Eagle3Draft, token_D: torch.Tensor) -> int:
    """Copy the weights of a checkpoint that passes check_initial into the draft.

    Head rows go by the token they stand for; a token that the checkpoint does not have
    keeps the row it was initialized with (the verifier's).

    Args:
        token_D: the verifier's token of each id of this draft's vocabulary.

    Returns:
        Number of head rows taken over.
    """
    found = read_weights(folder)
    head = found.pop("lm_head.weight")
    d2t = found.get("d2t", torch.zeros(len(head), dtype=torch.int64))
    row_of = {token: row for row, token in enumerate((torch.arange(len(head)) + d2t).tolist())}
    pairs = [(i, row_of[token]) for i, token in enumerate(token_D.tolist()) if token in row_of]
    ours, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    parameters = dict(draft.named_parameters())
    for name, value in found.items():
        if name not in NOT_TRAINED:
            parameters[name].copy_(value)
    device = draft.lm_head.weight.device
    draft.lm_head.weight[ours.to(device)] = head[theirs].to(device, torch.float32)
    return len(pairs)


def load_draft(folder: Path) -> Eagle3Draft | None:
    """The draft, float32 on the CPU; None where its rotary embedding is scaled, which nothing
    here computes."""
    layer = read_config(folder)
    if not layer["plain_rope"]:
        return None
    found = read_weights(folder)
    H, heads = layer["hidden_size"], layer["num_attention_heads"]
    shape = DraftShape(
        hidden_size=H,
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or H // heads,
        rope_theta=layer["rope_theta"],
        rms_norm_eps=layer["rms_norm_eps"],
        num_aux_layers=found["fc.weight"].shape[1] // H,
        draft_vocab_size=len(found["lm_head.weight"]),
        vocab_size=layer["vocab_size"],
        **{key: layer[key] for key in NORMS},
    )
    with torch.device("meta"):
        draft = Eagle3Draft(shape)
    weights = {k: v.float() for k, v in found.items() if k not in NOT_TRAINED}
    try:
        draft.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        raise UserError(f"{folder}: is not a draft of its config.json: {e}") from None
    return draft
