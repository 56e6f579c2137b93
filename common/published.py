"""A draft's checkpoint: reading it whole, and starting from one, whatever vocabulary map it was
made with.

Reads speculators' format and plain EAGLE-3 checkpoints (LlamaForCausalLMEagle3, whose layer may
be called `midlayer`), safetensors only.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.artifacts import read_json
from common.cli import UserError
from common.draft_shape import SHAPE_KEYS, DraftShape
from common.verifier import safetensors_header

if TYPE_CHECKING:
    import torch

    from common.eagle3 import Eagle3Draft

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_TRAINED = ("embed_tokens.weight", "d2t", "t2d")


def ours(name: str) -> str:
    """A published tensor's name in this project."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def read_config(folder: Path) -> dict[str, Any]:
    """Its config.json, flat: the layer's keys, those of NORMS, and `plain_rope`."""
    config = read_json(folder / "config.json")
    layer: dict[str, Any] = config.get("transformer_layer_config") or config
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    # what an absent key means differs between the formats (vLLM reads them so)
    default = {"norm_before_residual": "transformer_layer_config" in config}
    norms = {key: bool(config.get(key, default.get(key, False))) for key in NORMS}
    plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return layer | rope | norms | {"plain_rope": plain}


def check_initial(folder: Path, shape: DraftShape) -> None:
    """UserError unless the checkpoint is a draft of this very architecture."""
    layer = read_config(folder)
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"--init-from {folder}: has no model.safetensors; convert the draft to it")
    header = safetensors_header(file)
    for key in NORMS:
        if layer[key] != getattr(shape, key):
            flag = "--" + ("" if layer[key] else "no-") + key.replace("_", "-")
            raise UserError(f"--init-from {folder}: its {key} is {layer[key]}; pass {flag}")
    for key in SHAPE_KEYS:
        if key in layer and layer[key] != getattr(shape, key):
            raise UserError(
                f"--init-from {folder}: its {key} is {layer[key]}, --draft says"
                f" {getattr(shape, key)}; make them equal"
            )
    names = {ours(k) for k in header if k != "__metadata__"}
    missing = {"fc.weight", "layers.0.self_attn.q_proj.weight", "lm_head.weight"} - names
    if missing:
        raise UserError(f"--init-from {folder}: has no {min(missing)}; is it an EAGLE-3 draft?")
    if "d2t" not in names and header_rows(header, "lm_head.weight") != shape.vocab_size:
        raise UserError(f"--init-from {folder}: has no d2t, so its lm_head cannot be read")


def header_rows(header: dict[str, Any], name: str) -> int:
    return next((v["shape"][0] for k, v in header.items() if ours(k) == name), 0)


def initialize_from(folder: Path, draft: "Eagle3Draft", target_D: "torch.Tensor") -> int:
    """Copy a published draft's weights into this one.

    Head rows go by the token they stand for; a token that the published draft does not have
    keeps the row it was initialized with (the verifier's).

    Args:
        target_D: draft id → target id of this draft's map.

    Returns:
        Number of head rows taken over.
    """
    import torch
    from safetensors.torch import load_file

    found = {ours(k): v for k, v in load_file(folder / "model.safetensors").items()}
    head = found.pop("lm_head.weight")
    d2t = found.get("d2t", torch.zeros(len(head), dtype=torch.int64))
    place_of = {int(t): i for i, t in enumerate((torch.arange(len(head)) + d2t).tolist())}
    pairs = [(i, place_of[t]) for i, t in enumerate(target_D.tolist()) if t in place_of]
    mine, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    parameters = dict(draft.named_parameters())
    weights = {k: v for k, v in found.items() if k not in NOT_TRAINED}
    odd = weights.keys() ^ (parameters.keys() - {"lm_head.weight"})
    if odd:
        raise UserError(f"--init-from {folder}: {min(odd)} is in one of the two drafts only")
    with torch.no_grad():
        for name, value in weights.items():
            if value.shape != parameters[name].shape:
                raise UserError(
                    f"--init-from {folder}: {name} is {tuple(value.shape)}, expected"
                    f" {tuple(parameters[name].shape)}"
                )
            parameters[name].copy_(value)
        device = draft.lm_head.weight.device
        draft.lm_head.weight[mine.to(device)] = head[theirs].to(device, torch.float32)
    return len(pairs)


def load_draft(folder: Path) -> "Eagle3Draft | None":
    """The draft, float32 on the CPU; None where its rotary embedding is scaled, which nothing
    here computes."""
    import torch
    from safetensors.torch import load_file

    from common.eagle3 import Eagle3Draft

    layer = read_config(folder)
    if not layer["plain_rope"]:
        return None
    found = {ours(k): v for k, v in load_file(folder / "model.safetensors").items()}
    H, heads = layer["hidden_size"], layer["num_attention_heads"]
    shape = DraftShape(
        hidden_size=H,
        intermediate_size=layer["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or H // heads,
        rope_theta=layer.get("rope_theta", 10000.0),
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
