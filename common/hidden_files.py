"""The files of hidden states that 03 writes and 04 reads.

<hidden_states>/rows_<first>-<last>/hs_<index>.safetensors, one a sample:

    hidden_states  [T, len(layers), H]  residual stream after each layer, layers ascending;
                                        the last is the final layer before the final norm
    token_ids      int64 [T]
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from common.artifacts import atomic_file
from common.cli import UserError
from common.verifier import safetensors_header

if TYPE_CHECKING:
    import torch

ROWS_A_FOLDER = 1000
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def hidden_file(folder: Path, index: int) -> Path:
    """Path of a sample's file."""
    first = index // ROWS_A_FOLDER * ROWS_A_FOLDER
    return folder / f"rows_{first}-{first + ROWS_A_FOLDER - 1}" / f"hs_{index}.safetensors"


def bytes_a_token(num_layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes on disk of one token: its states and its id (57,352 for Kimi-K2.5 in bf16)."""
    return num_layers * hidden_size * DTYPE_BYTES[dtype] + 8


def write_hidden(path: Path, hidden_TLH: "torch.Tensor", token_ids_T: "torch.Tensor") -> str:
    """Write one sample's file, whole or not at all; returns the sha256 of its bytes."""
    from safetensors.torch import save

    data = save({"hidden_states": hidden_TLH.contiguous(), "token_ids": token_ids_T.contiguous()})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as f:
        f.write(data)
    return hashlib.sha256(data).hexdigest()


def check_hidden_file(
    path: Path, tokens: int, num_layers: int, hidden_size: int, dtype: str
) -> None:
    """UserError unless the file is whole and of the shape that the report promises."""
    if not path.is_file():
        raise UserError(f"{path}: missing; run 03 again, it makes what is missing")
    header = safetensors_header(path)
    want = {
        "hidden_states": ([tokens, num_layers, hidden_size], SAFETENSORS_DTYPES[dtype]),
        "token_ids": ([tokens], "I64"),
    }
    for name, (shape, kind) in want.items():
        found = header.get(name, {})
        if (found.get("shape"), found.get("dtype")) != (shape, kind):
            raise UserError(
                f"{path}: {name} is {found.get('dtype')} {found.get('shape')}, expected {kind}"
                f" {shape}; delete it and run 03 again"
            )


def read_hidden(path: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (hidden_states [T, L, H], token_ids [T]) of one sample's file."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    return tensors["hidden_states"], tensors["token_ids"]
