"""What is known of a verifier from its config.json, without loading it.

Reads config.json (text part of multimodal wrappers unwrapped) and the end-of-turn ids; imports
neither torch nor transformers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.verifier.files import model_file, optional_file, read_object

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
    text = text_config(config, config_file)
    return make_verifier(model_path, config, end_ids(model_path, config, text), config_file)


def text_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """The language model's part of config.json, `source`."""
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UserError(f"{source}: text_config is no JSON object; download the file again")
    return text


def make_verifier(
    model_path: str, config: dict[str, Any], ends: tuple[int, ...], source: Path
) -> Verifier:
    """The verifier that a config.json describes; opens no file.

    Args:
        ends: ids at which it stops, see end_ids.
        source: the file that errors name.
    """
    text = text_config(config, source)
    eps = text.get("rms_norm_eps")
    need = {}
    for key in NEEDED:
        if text.get(key) is None:
            raise UserError(f"{source}: no {key}; is {model_path} a language model?")
        need[key] = text[key]
    for key in (*NEEDED, *COUNTS):
        value = text.get(key)
        if value is not None and (not isinstance(value, int) or value < (key in NEEDED)):
            raise UserError(f"{source}: {key} is {value!r}; download the file again")
    if eps is None:
        raise UserError(f"{source}: no rms_norm_eps; only verifiers with RMSNorm are known")
    if not isinstance(eps, float | int):
        raise UserError(f"{source}: rms_norm_eps is {eps!r}; download the file again")
    return Verifier(
        path=model_path,
        config=config,
        text=text,
        num_layers=need["num_hidden_layers"],
        hidden_size=need["hidden_size"],
        vocab_size=need["vocab_size"],
        rms_norm_eps=float(eps),
        max_positions=int(text.get("max_position_embeddings") or 0),
        end_ids=ends,
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
