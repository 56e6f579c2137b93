"""The settings of tools/evaluate_draft.py."""

from dataclasses import dataclass
from typing import Any

from common.verifier.engine import EngineSettings


@dataclass(frozen=True)
class EvaluateSettings:
    """The script's flags, a field each; `engine` has those of vLLM's engine."""

    model_path: str
    draft: str
    prompts: list[str]
    output_dir: str
    max_samples: int | None
    hidden_states: str | None
    template_args: dict[str, Any]
    num_speculative_tokens: int
    max_new_tokens: int
    only_draft: bool
    seed: int
    dry_run: bool
    overwrite: bool
    engine: EngineSettings

    def manifest_settings(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        """The manifest's settings: what decides the counts; a resume must have the same."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "max_new_tokens": self.max_new_tokens,
            "template_args": self.template_args,
            "max_samples": self.max_samples,
            "max_seq_len": self.engine.max_seq_len,
            "batch_size": self.engine.batch_size,
            "dtype": self.engine.dtype,
            "tp_size": self.engine.tp_size,
            "engine_args": self.engine.engine_args,
            "end_ids": sorted(end_ids),
        }
