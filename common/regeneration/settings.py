"""The settings of tools/regenerate_responses.py."""

from dataclasses import dataclass
from typing import Any

from common.verifier.engine import EngineSettings


@dataclass(frozen=True)
class RegenerateSettings:
    """The script's flags, a field each; `engine` has those of vLLM's engine."""

    model_path: str
    output_dir: str
    prompts: list[str]
    max_samples: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    answers_per_prompt: int
    all_turns: bool
    template_args: dict[str, Any]
    seed: int
    endpoint: str | None
    served_model: str | None
    concurrency: int
    retries: int
    request_timeout: float  # seconds
    skip_bad_rows: bool
    dry_run: bool
    overwrite: bool
    engine: EngineSettings

    def manifest_settings(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        """The manifest's settings: what decides the answers; a resume must have the same."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "answers_per_prompt": self.answers_per_prompt,
            "all_turns": self.all_turns,
            "template_args": self.template_args,
            "max_samples": self.max_samples,
            "max_seq_len": self.engine.max_seq_len,
            "seed": self.seed,
            "dtype": self.engine.dtype,
            "engine_args": self.engine.engine_args,
            "endpoint": bool(self.endpoint),
            "served_model": self.served_model,
            "skip_bad_rows": self.skip_bad_rows,
            "end_ids": sorted(end_ids),
        }
