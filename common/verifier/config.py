"""What is known of a verifier from its config.json, without loading it.

Reads config.json (text part of multimodal wrappers unwrapped) and the end-of-turn ids. Imports no
torch, and transformers only for a config.json that leaves shapes to its family's defaults.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.verifier.files import model_file, optional_file, read_object

NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
# Names that published files have in their place and that are not read here.
OTHER_NAMES = ("n_layer", "n_layers", "n_embd", "d_model", "dim", "n_vocab")
COUNTS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "max_position_embeddings",
)  # fmt: skip

# A wrapper's key for its language model, whose part may have such a key itself (Qwen-Omni's).
WRAPPED = ("text_config", "llm_config", "language_config", "thinker_config")

# Families whose final norm is a LayerNorm (Cohere's where there is no rms_norm_eps).
LAYER_NORM = (
    "biogpt", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "jais", "jais2", "mpt",
    "nemotron", "olmo", "opt", "orion", "persimmon", "phi", "phimoe", "stablelm", "starcoder2",
    "xglm",
)  # fmt: skip
# Families whose final norm is an RMSNorm with its eps under another key than rms_norm_eps.
RMS_NORM = {
    "layer_norm_epsilon": ("exaone", "falcon_mamba", "mamba", "mamba2", "nemotron_h"),
    "layernorm_epsilon": ("chatglm", "mimo_v2", "mimo_v2_flash", "mimo_v2_omni"),
    "norm_eps": ("lfm2", "lfm2_moe"),
}
# Families whose sliding window holds in every layer where config.json has no layer_types.
WINDOW_EVERYWHERE = ("mistral", "mixtral", "phi3")


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
        """Layers 2, n//2, n-3 and n-1 (2/30/58/60 for 61): three aux layers and the last. Of fewer
        than seven layers, where some of these are one, also layers before layer 2."""
        n = self.num_layers
        chosen = {min(2, n - 1), n // 2, max(n - 3, 0), n - 1}
        for layer in (1, 0):
            if len(chosen) < min(n, 4):
                chosen.add(layer)
        return sorted(chosen)

    @property
    def window(self) -> int | None:
        """Tokens that every layer attends to at most, where that is below its positions."""
        t, types = self.text, self.text.get("layer_types")
        everywhere = (
            {*types} == {"sliding_attention"}
            if isinstance(types, list)
            else t.get("model_type") in WINDOW_EVERYWHERE
        )
        window = t.get("sliding_window") or 0
        on = everywhere and t.get("use_sliding_window") is not False
        return window if on and 0 < window < (self.max_positions or 2**31) else None

    def longest_sample(self, max_seq_len: int) -> int:
        """Most tokens of a sample: one more, which vLLM adds, has to fit into its positions."""
        return min(max_seq_len, (self.max_positions or 2**31) - 1)


def load_verifier(model_path: str) -> Verifier:
    """Read a verifier's config.json (and generation_config.json where there is one)."""
    config_file = model_file(model_path, "config.json")
    config = read_object(config_file)
    text = text_config(config, config_file)
    return make_verifier(model_path, config, end_ids(model_path, config, text), config_file)


def text_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """The language model's part of config.json, `source`."""
    for key in WRAPPED:
        if config.get(key):
            if not isinstance(config[key], dict):
                raise UserError(f"{source}: {key} is no JSON object; download the file again")
            return text_config(config[key], source)
    return config


def make_verifier(
    model_path: str, config: dict[str, Any], ends: tuple[int, ...], source: Path
) -> Verifier:
    """The verifier that a config.json describes; opens no file.

    Args:
        ends: ids at which it stops, see end_ids.
        source: the file that errors name.
    """
    text = complete(text_config(config, source))
    missing = [key for key in NEEDED if text.get(key) is None]
    key, why_not = norm_key(text)
    if missing:
        instead = ", ".join(k for k in OTHER_NAMES if k in text)
        lacks = f"has no {', '.join(missing)}" + (instead and f" ({instead}: not read here)")
        raise UserError(f"{source}: {lacks}; {why_not or 'add it, or pass another --model-path'}")
    if why_not:
        raise UserError(f"{source}: {why_not}")
    for name in (*NEEDED, *COUNTS):
        value = text.get(name)
        if value is not None and (not isinstance(value, int) or value < (name in NEEDED)):
            raise UserError(f"{source}: {name} is {value!r}; download the file again")
    if not isinstance(text[key], float | int):
        raise UserError(f"{source}: {key} is {text[key]!r}; download the file again")
    return Verifier(
        path=model_path,
        config=config,
        text=text,
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        rms_norm_eps=float(text[key]),
        max_positions=int(text.get("max_position_embeddings") or 0),
        end_ids=ends,
    )


def complete(text: dict[str, Any]) -> dict[str, Any]:
    """`text` with the shapes that it names otherwise, or leaves to its family's defaults.

    vLLM takes the defaults from transformers; Gemma 3's published file has no vocab_size.
    """
    blocks = text.get("layers_block_type")
    given = {
        "num_hidden_layers": len(blocks) if isinstance(blocks, list) else text.get("num_layers"),
        "vocab_size": text.get("padded_vocab_size"),
    }
    text = text | {k: v for k, v in given.items() if v is not None and text.get(k) is None}
    lacking = any(text.get(k) is None for k in NEEDED) or not eps_keys(text)
    if not lacking or any(k in text for k in OTHER_NAMES):
        return text
    from transformers import CONFIG_MAPPING

    try:
        family = CONFIG_MAPPING[text["model_type"]](**text)
    except Exception:  # no such family, or values that its class refuses: what lacks is said then
        return text
    found = {k: getattr(family, k, None) for k in (*NEEDED, *COUNTS, "rms_norm_eps")}
    return text | {k: v for k, v in found.items() if v is not None and text.get(k) is None}


def eps_keys(text: dict[str, Any]) -> list[str]:
    """The keys under which a norm's eps stands."""
    return [k for k, v in text.items() if re.search("(norm|ln).*eps", k) and v is not None]


def norm_key(text: dict[str, Any]) -> tuple[str, str]:
    """The key of the final norm's eps, and why that norm cannot be used: "" where it can."""
    family, found = text.get("model_type"), eps_keys(text)
    named = f" ({', '.join(found)})" if found else ""
    key = next((k for k, families in RMS_NORM.items() if k in found and family in families), "")
    if "rms_norm_eps" in found:
        key = "rms_norm_eps"
    if family in LAYER_NORM and not (key and str(family).startswith("cohere")):
        return key, (
            f"model_type {family} ends in a LayerNorm{named}, a draft's targets are made with an"
            " RMSNorm; choose a verifier that ends in one"
        )
    if not key:
        return key, (
            f"no rms_norm_eps{named}, and model_type {family} is not known to end in an RMSNorm;"
            " if it does, add it to RMS_NORM in common/verifier/config.py"
        )
    return key, ""


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
