"""The flags of 01 and 02, one field per flag; filled before anything heavy is imported."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TemplateSettings:
    """The flags of scripts that render prompts. date: YYYY-MM-DD, None where it is not given."""

    model_path: str
    output_dir: str
    template_args: dict[str, Any]
    date: str | None
    overwrite: bool
    trust_remote_code: bool


@dataclass(frozen=True)
class PrepareSettings(TemplateSettings):
    """Flags of 01; None where one is not given.

    dataset: `NAME[,option=value..]`, see sources.parse_source.
    max_samples: samples written; max_seq_len: tokens of a sample.
    long: what becomes of a longer sample: cut, drop or split.
    workers: processes. show: samples to print instead of writing any.
    """

    dataset: list[str]
    max_samples: int | None
    max_seq_len: int
    long: str
    keep_unfinished: bool
    drop_looping: bool
    skip_bad_rows: bool
    workers: int
    show: int | None
    seed: int
    dry_run: bool


@dataclass(frozen=True)
class VocabSettings:
    """Flags of 02; None where one is not given.

    prepared_data: `PATH[,weight=..]`, see vocab_map.parse_prepared.
    max_samples: samples read of each; draft_vocab_size: tokens.
    """

    model_path: str
    prepared_data: list[str]
    output_dir: str
    max_samples: int | None
    draft_vocab_size: int
    seed: int
    dry_run: bool
    overwrite: bool
    trust_remote_code: bool
