"""04's flags as its settings; imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainSettings:
    """04's flags; see 04_train.py --help.

    `auto` in device and compute_dtype, and no rows_per_step, are resolved by inputs.choose_compute
    and the script's check.
    """

    model_path: str | None
    quantized_copy: bool
    prepared_data: str
    vocab_map: str
    hidden_states: str
    output_dir: str
    max_samples: int | None
    max_seq_len: int
    layers: list[int] | None
    epochs: int
    max_batch_tokens: int
    rows_per_step: int | None
    ttt_steps: int
    ttt_decay: float
    loss_rule: str
    optimizer: str
    lr: float
    warmup: float
    weight_decay: float
    clip: float
    heldout_fraction: float
    train_lm_head: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    draft_shape: dict[str, Any]
    init_from: str | None
    save_every: int  # steps
    keep_states: int
    patience: int | None  # epochs
    tensorboard: bool
    device: str
    compute_dtype: str
    float8: bool
    seed: int
    dry_run: bool
    overwrite: bool

    @property
    def out(self) -> Path:
        return Path(self.output_dir)

    @property
    def dtype(self) -> "torch.dtype":
        """The resolved compute_dtype."""
        import torch

        return getattr(torch, self.compute_dtype)
