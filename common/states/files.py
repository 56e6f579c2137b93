"""The files of hidden states that 03 writes and 04 reads.

<hidden_states>/rows_<first>-<last>/hs_<index>.safetensors, one per sample:

    hidden_states        [T, len(layers), H]  residual stream after each layer, layers
                                              ascending; the last is the final layer before
                                              the final norm
    hidden_states_scale  float32 [T, len(layers)]  of float8_e4m3fn files only: the stream is
                                              hidden_states * hidden_states_scale
    token_ids            int64 [T]

A folder holds either those files, or shard folders `shard-<i>-of-<n>` with them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from common.artifacts import atomic_file
from common.errors import UserError
from common.tensor_files import DTYPES, ITEM_BYTES, TensorPlace, header_bytes, read_header

if TYPE_CHECKING:
    import torch

ROWS_PER_FOLDER = 1000
FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
LEAST_SCALE = 1e-30  # of a float8 row; a smaller row may become zeros


def hidden_file(folder: Path, index: int) -> Path:
    """Path of a sample's file."""
    first = index // ROWS_PER_FOLDER * ROWS_PER_FOLDER
    return folder / f"rows_{first}-{first + ROWS_PER_FOLDER - 1}" / f"hs_{index}.safetensors"


@dataclass(frozen=True)
class StatesFormat:
    """What a folder's files hold: the residual stream after `layers` layers, `hidden_size` wide,
    in `dtype` (a torch name; float8_e4m3fn has a scale per token and layer)."""

    layers: int
    hidden_size: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes on disk of one token: its states, their scales and its id (Kimi-K2.5: 57,352 in
        bfloat16, 28,696 in float8)."""
        scales = 4 * self.layers if self.dtype == FP8 else 0
        return self.layers * self.hidden_size * ITEM_BYTES[DTYPES[self.dtype]] + scales + 8

    def tensors(self, tokens: int) -> dict[str, tuple[str, list[int]]]:
        """The tensors of a file of so many tokens: name → (dtype as safetensors names it, shape),
        in the order that the safetensors library gives them (widest dtype first)."""
        found = {"token_ids": ("I64", [tokens])}
        if self.dtype == FP8:
            found["hidden_states_scale"] = ("F32", [tokens, self.layers])
        shape = [tokens, self.layers, self.hidden_size]
        return found | {"hidden_states": (DTYPES[self.dtype], shape)}


# ---------------------------------------------------------------- writing


def file_header(tokens: int, form: StatesFormat) -> bytes:
    """What a sample's file begins with."""
    return header_bytes(form.tensors(tokens))


def file_bytes(tokens: int, form: StatesFormat) -> int:
    """Size of a sample's file."""
    return len(file_header(tokens, form)) + tokens * form.bytes_per_token


def write_parts(path: Path, parts: "list[memoryview]") -> str:
    """Write a file from its parts, complete or not at all; returns the xxh3_128 of its bytes.

    Runs no tensor operations and lets go of the interpreter while it hashes and writes, so
    that many threads can run it beside the forward passes.
    """
    checksum = xxhash.xxh3_128()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as f:
        for part in parts:
            checksum.update(part)
            f.write(part)
    return checksum.hexdigest()


def quantize_rows(
    rows_NH: "torch.Tensor", largest_N: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantize rows to float8_e4m3fn with one scale per row.

    Args:
        rows_NH: rows of the residual stream.
        largest_N: largest |value| of each row.

    Returns:
        (float8 rows [N, H], float32 scales [N]) with rows = float8 * scale.
    """
    import torch

    scale_N = (largest_N.float() / FP8_MAX).clamp_min(LEAST_SCALE)
    return (rows_NH.float() / scale_N[:, None]).to(torch.float8_e4m3fn), scale_N


def dequantize_rows(
    rows: "torch.Tensor", scale: "torch.Tensor", dtype: "torch.dtype"
) -> "torch.Tensor":
    """The inverse of quantize_rows, in `dtype`: float8 rows [..., H] times their scales [...]."""
    return (rows.float() * scale[..., None]).to(dtype)


# ---------------------------------------------------------------- reading


def check_hidden_file(path: Path, tokens: int, form: StatesFormat) -> dict[str, TensorPlace]:
    """Where the file's tensors lie; UserError unless it is complete and of the folder's format."""
    if not path.is_file():
        raise UserError(f"{path}: missing; run 03 again, it makes what is missing")
    try:
        found = read_header(path)
    except UserError as e:
        raise UserError(f"{e}: delete it and run 03 again") from None
    for name, (kind, shape) in form.tensors(tokens).items():
        place = found.get(name)
        if place is None or (place.shape, place.dtype) != (shape, kind):
            has = f"{place.dtype} {place.shape}" if place else "missing"
            raise UserError(
                f"{path}: {name} is {has}, expected {kind} {shape}; delete it and run 03 again"
            )
    return found


def check_token_ids(path: Path, place: TensorPlace, input_ids: np.ndarray) -> None:
    """UserError unless a checked file, whose token_ids lie at `place`, is of these ids."""
    with open(path, "rb") as f:
        f.seek(place.begin)
        stored = np.frombuffer(f.read(place.end - place.begin), dtype=np.int64)
    if not np.array_equal(stored, input_ids):
        raise UserError(f"{path}: its token_ids are not the sample's; delete it and run 03 again")


def read_hidden(path: Path, first: int | None = None) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return (hidden_states [T, L, H], token_ids [T]) of one sample's file, or of its `first`
    tokens; the states as stored, of float8 files as bfloat16."""
    import torch
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        tensors = {name: f.get_slice(name)[:first] for name in f.keys()}  # noqa: SIM118
    states_TLH = tensors["hidden_states"]
    if "hidden_states_scale" in tensors:
        states_TLH = dequantize_rows(states_TLH, tensors["hidden_states_scale"], torch.bfloat16)
    return states_TLH, tensors["token_ids"]
