"""The files of hidden states that 03 writes and 04 reads.

<hidden_states>/rows_<first>-<last>/hs_<index>.safetensors, one a sample:

    hidden_states        [T, len(layers), H]  residual stream after each layer, layers
                                              ascending; the last is the final layer before
                                              the final norm
    hidden_states_scale  float32 [T, len(layers)]  of float8_e4m3fn files only: the stream is
                                              hidden_states * hidden_states_scale
    token_ids            int64 [T]

A folder holds either those files, or shard folders `shard-<i>-of-<n>` that hold them.
"""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from common.artifacts import atomic_file
from common.errors import UserError
from common.verifier.config import safetensors_header

if TYPE_CHECKING:
    import torch

ROWS_A_FOLDER = 1000
FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", FP8: "F8_E4M3"}


def hidden_file(folder: Path, index: int) -> Path:
    """Path of a sample's file."""
    first = index // ROWS_A_FOLDER * ROWS_A_FOLDER
    return folder / f"rows_{first}-{first + ROWS_A_FOLDER - 1}" / f"hs_{index}.safetensors"


def bytes_a_token(num_layers: int, hidden_size: int, dtype: str) -> int:
    """Bytes on disk of one token: its states, their scales and its id (Kimi-K2.5: 57,352 in
    bfloat16, 28,696 in float8)."""
    scales = 4 * num_layers if dtype == FP8 else 0
    return num_layers * hidden_size * DTYPE_BYTES[dtype] + scales + 8


# ---------------------------------------------------------------- writing


def file_header(tokens: int, num_layers: int, hidden_size: int, dtype: str) -> bytes:
    """What a safetensors file begins with: its length, the JSON of its tensors, padding.

    Tensors lie in the order that the safetensors library gives them (widest dtype first).
    Source: the format's description, https://github.com/huggingface/safetensors.
    """
    tensors = [("token_ids", "I64", [tokens], 8 * tokens)]
    if dtype == FP8:
        scales = ("hidden_states_scale", "F32", [tokens, num_layers], 4 * tokens * num_layers)
        tensors.append(scales)
    size = tokens * num_layers * hidden_size * DTYPE_BYTES[dtype]
    shape = [tokens, num_layers, hidden_size]
    tensors.append(("hidden_states", SAFETENSORS_DTYPES[dtype], shape, size))
    described, offset = {}, 0
    for name, kind, shape, size in tensors:
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def file_bytes(tokens: int, num_layers: int, hidden_size: int, dtype: str) -> int:
    """Size of a sample's file."""
    header = len(file_header(tokens, num_layers, hidden_size, dtype))
    return header + tokens * bytes_a_token(num_layers, hidden_size, dtype)


def write_parts(path: Path, parts: "list[memoryview]") -> str:
    """Write a file from its parts, whole or not at all; returns the xxh3_128 of its bytes.

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


def file_checksum(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 24):
            checksum.update(chunk)
    return checksum.hexdigest()


def quantize_rows(
    rows_NH: "torch.Tensor", largest_N: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Quantize rows to float8_e4m3fn with one scale a row.

    Args:
        rows_NH: rows of the residual stream.
        largest_N: largest |value| of each row.

    Returns:
        (float8 rows [N, H], float32 scales [N]) with rows = float8 * scale.
    """
    import torch

    scale_N = (largest_N.float() / FP8_MAX).clamp_min(1e-30)
    return (rows_NH.float() / scale_N[:, None]).to(torch.float8_e4m3fn), scale_N


def dequantize_rows(
    rows: "torch.Tensor", scale: "torch.Tensor", dtype: "torch.dtype"
) -> "torch.Tensor":
    """The inverse of quantize_rows, in `dtype`: float8 rows [..., H] times their scales [...]."""
    return (rows.float() * scale[..., None]).to(dtype)


# ---------------------------------------------------------------- reading


def check_hidden_file(
    path: Path, tokens: int, num_layers: int, hidden_size: int, dtype: str
) -> dict[str, Any]:
    """The file's header; UserError unless it is whole and of the shape that the report promises."""
    if not path.is_file():
        raise UserError(f"{path}: missing; run 03 again, it makes what is missing")
    try:
        header = safetensors_header(path)
    except UserError as e:
        raise UserError(f"{e}: delete it and run 03 again") from None
    want: dict[str, tuple[list[int], str]] = {
        "hidden_states": ([tokens, num_layers, hidden_size], SAFETENSORS_DTYPES[dtype]),
        "token_ids": ([tokens], "I64"),
    }
    if dtype == FP8:
        want["hidden_states_scale"] = ([tokens, num_layers], "F32")
    for name, (shape, kind) in want.items():
        found = header.get(name, {})
        if (found.get("shape"), found.get("dtype")) != (shape, kind):
            raise UserError(
                f"{path}: {name} is {found.get('dtype')} {found.get('shape')}, expected {kind}"
                f" {shape}; delete it and run 03 again"
            )
    return header


def check_token_ids(path: Path, header: dict[str, Any], input_ids: np.ndarray) -> None:
    """UserError unless a checked file, whose header this is, is of these ids."""
    first, end = header["token_ids"]["data_offsets"]
    with open(path, "rb") as f:
        f.seek(8 + int.from_bytes(f.read(8), "little") + first)
        stored = np.frombuffer(f.read(end - first), dtype=np.int64)
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
