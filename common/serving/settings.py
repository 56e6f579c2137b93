"""The settings of tools/evaluate_draft.py."""

from dataclasses import dataclass
from typing import Any

from common.data.settings import TemplateSettings
from common.verifier.engine import EngineSettings

# What decides the counts; a resume must have the same.
RECORDED = (
    "num_speculative_tokens", "max_new_tokens", "template_args", "max_samples", "max_seq_len",
    "batch_size", "dtype", "tp_size", "engine_args",
)  # fmt: skip


@dataclass(frozen=True)
class EvaluateSettings(EngineSettings, TemplateSettings):
    """The script's flags, a field each, with those of the engine."""

    draft: str
    prompts: list[str]
    max_samples: int | None
    hidden_states: str | None
    aux_ids: list[int] | None
    quantized_copy: bool
    num_speculative_tokens: int
    max_new_tokens: int
    only_draft: bool
    skip_bad_rows: bool
    seed: int
    dry_run: bool

    def manifest_settings(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RECORDED}
        given = {
            "aux_ids": self.aux_ids,
            "quantized_copy": self.quantized_copy,
            "skip_bad_rows": self.skip_bad_rows,
        }
        return values | {"end_ids": sorted(end_ids)} | {k: v for k, v in given.items() if v}
