"""The settings of tools/evaluate_draft.py."""

from dataclasses import dataclass
from typing import Any

from common.verifier.engine import EngineSettings

# What decides the counts; a resume must have the same.
RECORDED = (
    "num_speculative_tokens", "max_new_tokens", "template_args", "max_samples", "max_seq_len",
    "batch_size", "dtype", "tp_size", "engine_args",
)  # fmt: skip


@dataclass(frozen=True)
class EvaluateSettings(EngineSettings):
    """The script's flags, a field each, with those of the engine."""

    model_path: str
    draft: str
    prompts: list[str]
    output_dir: str
    max_samples: int | None
    hidden_states: str | None
    aux_ids: list[int] | None
    quantized_copy: bool
    template_args: dict[str, Any]
    num_speculative_tokens: int
    max_new_tokens: int
    only_draft: bool
    seed: int
    dry_run: bool
    overwrite: bool

    def manifest_settings(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RECORDED}
        given = {"aux_ids": self.aux_ids, "quantized_copy": self.quantized_copy}
        return values | {"end_ids": sorted(end_ids)} | {k: v for k, v in given.items() if v}
