"""A draft's checkpoint, ours or from elsewhere: its config.json, its tensors, and what of them no
server would notice to be wrong.

Reads speculators' format and plain EAGLE-3 checkpoints (LlamaForCausalLMEagle3, whose layer may
be called `midlayer`), in one safetensors file or several.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from common.artifacts import read_json, sha256_file, sha256_json
from common.draft.config import DraftShape
from common.draft.model import Eagle3Draft
from common.errors import UserError
from common.tensor_files import FLOATS, TensorPlace, read_header

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NEEDED = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "rms_norm_eps",
)  # fmt: skip
ROPE_THETA = 10000.0  # where a config says none, as transformers reads it
POSITIONS = {"llama": 2048, "qwen3": 32768}  # likewise
# rotary embeddings whose max_position_embeddings is scaled already, as vLLM reads them
SCALED = ("default", "llama3", "yarn", "longrope")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
NOT_TRAINED = ("embed_tokens.weight", "d2t", "t2d")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft's folder, by its config.json and its files' headers.

    config: flat: the layer's keys, those of NORMS, `rope_type`, and the others as they are;
    aux_ids: the layers as its config.json counts them, empty without; top_ids: whether they are
    where every server reads them; places: tensor, by its name in this project → its place.
    """

    folder: Path
    config: dict[str, Any]
    aux_ids: list[int]
    top_ids: bool
    files: list[Path]
    places: dict[str, TensorPlace]

    @property
    def tokens(self) -> int:
        """Size of its vocabulary."""
        return self.config.get("draft_vocab_size") or self.config["vocab_size"]

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sample that a server drafts for; None where nothing says it."""
        rope, t = self.config["rope_type"], self.config
        most = t.get("max_position_embeddings") or POSITIONS.get(t.get("model_type", ""))
        factor = 1 if rope in SCALED else t.get("factor") or 1
        return most and int(most * factor)

    @property
    def family(self) -> str:
        """llama or qwen3, of whose one layer the tensors are known; else what it is."""
        name = (self.config.get("architectures") or [self.config.get("model_type")])[0]
        if self.config["num_hidden_layers"] != 1:
            return f"{name} of {self.config['num_hidden_layers']} layers"
        if "Deepseek" in name:
            return name
        return "qwen3" if "Qwen3For" in name or name == "qwen3" else "llama"

    @property
    def unlike(self) -> str | None:
        """Why the code here does not compute this draft; None where it does."""
        kinds = {p.dtype for name, p in self.places.items() if name not in NOT_TRAINED}
        if self.config.get("quantization_config") or kinds - set(FLOATS):
            return "its weights are quantised"
        if self.family != "llama":
            return f"it is no Llama layer but {self.family}"
        return None if self.config["rope_type"] == "default" else "its rotary embedding is scaled"

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors, by their names in this project."""
        found = {k: v for file in self.files for k, v in load_file(file).items()}
        return {parameter_name(k): v for k, v in found.items()}

    def digest(self) -> str:
        """Hash of the weights' files."""
        sums = [sha256_file(file) for file in self.files]
        return sums[0] if len(sums) == 1 else sha256_json(sums)

    def shape(self) -> DraftShape:
        """The shape that config.json and the width of `fc` ask for, of a Llama draft."""
        t = self.config
        H, heads = t["hidden_size"], t["num_attention_heads"]
        return DraftShape(
            hidden_size=H,
            intermediate_size=t["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=t.get("num_key_value_heads") or heads,
            head_dim=t.get("head_dim") or H // heads,
            rope_theta=t["rope_theta"],
            rms_norm_eps=t["rms_norm_eps"],
            num_aux_layers=self.places["fc.weight"].shape[1] // H,
            draft_vocab_size=self.tokens,
            vocab_size=t["vocab_size"],
            **{key: t[key] for key in NORMS},
        )


# ---------------------------------------------------------------- reading


def read_checkpoint(folder: Path) -> DraftCheckpoint:
    """UserError where the folder holds no EAGLE-3 draft, or pickles."""
    file = folder / "config.json"
    config = read_json(file)
    speculators = "transformer_layer_config" in config
    layer = config["transformer_layer_config"] if speculators else config
    kind = config.get("speculators_model_type") if speculators else "eagle3"
    if kind != "eagle3" or not isinstance(layer, dict):
        raise UserError(f"{file}: its speculators_model_type is {kind!r}, not eagle3")
    for key in NEEDED:
        if not layer.get(key):
            raise UserError(f"{file}: has no {key}; is the file complete?")
    if not speculators and not config.get("architectures"):
        raise UserError(f"{file}: has no architectures, by which a server knows what it loads")
    files = weight_files(folder)
    headers = {k: v for path in files for k, v in read_header(path).items()}
    places = {parameter_name(k): place for k, place in headers.items()}
    if "fc.weight" not in headers:
        names = "has no fc.weight" if "fc.weight" not in places else "calls its fc.weight model.fc"
        raise UserError(f"{folder}: {names}; it is not an EAGLE-3 draft that servers load")
    nested = layer.get("eagle_config") or {}
    ids = config.get(AUX_IDS) or nested.get(AUX_IDS) or []
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError(f"{file}: {AUX_IDS} is {ids!r}, expected layer ids")
    flat = flat_config(config, layer, speculators)
    return DraftCheckpoint(folder, flat, ids, bool(config.get(AUX_IDS)), files, places)


def flat_config(config: dict, layer: dict, speculators: bool) -> dict[str, Any]:
    """See DraftCheckpoint; absent keys mean what vLLM reads them as, which differs between the
    formats."""
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    norms = {"norm_before_residual": speculators} | config
    nested = layer.get("eagle_config") or {}
    if "norm_before_fc" in nested:
        norms["norm_before_fc"] = nested["norm_before_fc"]
    kind = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    names = {"architectures": layer.get("architectures")}  # config's is the speculator's class
    norms = {key: bool(norms.get(key)) for key in NORMS}
    return {"rope_theta": ROPE_THETA} | config | layer | rope | kind | names | norms


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a draft, those of its index if it has one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set((read_json(index).get("weight_map") or {}).values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent or not names:
            raise UserError(f"{index}: names {absent or 'no files'}, not there; download them")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if not files and pickles:
        raise UserError(
            f"{folder}: holds {pickles[0]}, a pickle, which is not read here because it can run"
            " code; convert it to model.safetensors"
        )
    if not files:
        raise UserError(f"{folder}: has no model.safetensors; run 04_train.py to its end")
    return files


def parameter_name(name: str) -> str:
    """A checkpoint tensor's name in this project."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def expected_sizes(shape: DraftShape) -> dict[str, list[int]]:
    """Of the tensors of a draft, those of NOT_TRAINED left out."""
    with torch.device("meta"):
        return {k: list(v.shape) for k, v in Eagle3Draft(shape).named_parameters()}


# ---------------------------------------------------------------- its values


def check_values(checkpoint: DraftCheckpoint) -> None:
    """UserError where a weight is not finite, or the map of the draft's tokens cannot be."""
    maps = {}
    for file in checkpoint.files:
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (no dict)
                tensor = f.get_tensor(name)
                if parameter_name(name) in ("d2t", "t2d"):
                    maps[parameter_name(name)] = tensor
                elif not tensor.float().isfinite().all():
                    raise UserError(
                        f"{file}: {name} has values that are not finite (NaN or Inf); such a draft"
                        " is never accepted, use an earlier checkpoint"
                    )
    if "d2t" in maps:
        check_map(checkpoint, **maps)


def check_map(
    checkpoint: DraftCheckpoint, d2t: torch.Tensor, t2d: torch.Tensor | None = None
) -> None:
    """UserError unless d2t sends the draft's tokens to different ones of the verifier's, those that
    t2d has, if it is there."""
    V, offsets = checkpoint.config["vocab_size"], "d2t holds offsets, verifier's id - draft's id"
    target_D = torch.arange(len(d2t)) + d2t
    outside = (target_D < 0) | (target_D >= V)
    if outside.any():
        i = int(outside.nonzero()[0])
        raise UserError(
            f"{checkpoint.folder}: d2t sends the draft's token {i} to {int(target_D[i])}, the"
            f" verifier has {V} tokens; {offsets}"
        )
    if len(target_D.unique()) < len(target_D):
        raise UserError(
            f"{checkpoint.folder}: d2t sends {len(target_D)} tokens to {len(target_D.unique())} of"
            f" the verifier's; {offsets}"
        )
    if t2d is not None and (len(t2d) != V or not t2d[target_D].all()):
        raise UserError(
            f"{checkpoint.folder}: d2t and t2d are of different tokens, one of them is another"
            f" draft's; {offsets}"
        )


def load_draft(checkpoint: DraftCheckpoint) -> tuple[Eagle3Draft, torch.Tensor | None]:
    """The draft, float32 on the CPU, without its head; and its own embedding if it has one."""
    found = checkpoint.weights()
    with torch.device("meta"):
        draft = Eagle3Draft(checkpoint.shape())
    weights = {name: found[name].float() for name, _ in draft.named_parameters() if name in found}
    weights.pop("lm_head.weight", None)
    draft.load_state_dict(weights, strict=False, assign=True)
    return draft, found.get("embed_tokens.weight")
