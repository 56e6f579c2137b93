"""The settings of tools/regenerate_responses.py."""

from dataclasses import dataclass
from typing import Any

from common.data.settings import TemplateSettings
from common.verifier.engine import EngineSettings

# What decides the answers; a resume must have the same.
RECORDED = (
    "max_new_tokens", "temperature", "top_p", "answers_per_prompt", "all_turns", "template_args",
    "max_samples", "max_seq_len", "seed", "dtype", "engine_args", "endpoint", "served_model",
    "skip_bad_rows",
)  # fmt: skip


@dataclass(frozen=True)
class RegenerateSettings(EngineSettings, TemplateSettings):
    """The script's flags, a field each, with those of the engine. request_timeout: seconds."""

    prompts: list[str]
    max_samples: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    answers_per_prompt: int
    all_turns: bool
    seed: int
    endpoint: str | None
    served_model: str | None
    concurrency: int
    retries: int
    request_timeout: float
    skip_bad_rows: bool
    dry_run: bool

    def manifest_settings(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in RECORDED}
        return values | {"endpoint": bool(self.endpoint), "end_ids": sorted(end_ids)}
