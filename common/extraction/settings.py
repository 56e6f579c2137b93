"""03's flags as its settings; imports nothing heavy."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExtractSettings:
    """03's flags; see 03_extract_hidden_states.py --help."""

    model_path: str
    prepared_data: str
    output_dir: str
    max_samples: int | None
    max_seq_len: int
    layers: list[int] | None
    tp_size: int
    max_batch_tokens: int
    batch_size: int
    gpu_memory_utilization: float
    dtype: str
    storage_dtype: str
    num_shards: int
    shard_index: int
    allow_missing: int
    engine_args: dict[str, Any]
    load_timeout: float  # minutes
    verify: bool
    dry_run: bool
    overwrite: bool
    trust_remote_code: bool
