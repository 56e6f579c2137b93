"""Headers of safetensors files: where the tensors lie, and how a file of ours begins.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from common.artifacts import decode_json
from common.errors import UserError

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}
FLOATS = ("F32", "F16", "BF16")
ITEM_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file.

    dtype: as the format names it (F32, BF16, ..); begin, end: bytes from the file's beginning.
    """

    dtype: str
    shape: list[int]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The tensors of a safetensors file by name; UserError when it is shorter than its header
    promises."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            if n > size - 8:
                raise ValueError("truncated header")
            header = decode_json(f.read(n))
        places = {}
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                places[name] = TensorPlace(
                    str(tensor["dtype"]), list(tensor["shape"]), 8 + n + begin, 8 + n + end
                )
        promised = max((place.end for place in places.values()), default=8 + n)
        if promised != size:
            raise ValueError(f"{size} bytes, its header promises {promised}")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise UserError(f"{path}: not a complete safetensors file ({e}); make it again") from None
    return places


def header_bytes(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """What a safetensors file begins with: its length, the JSON of its tensors, padding.

    Args:
        tensors: name → (dtype as the format names it, shape), in the order of their bytes, the
            widest dtype first.
    """
    described, offset = {}, 0
    for name, (kind, shape) in tensors.items():
        end = offset + tensor_bytes({name: (kind, shape)})
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensors: dict[str, tuple[str, list[int]]]) -> int:
    """Bytes of a file's tensors, see header_bytes."""
    return sum(math.prod(shape) * ITEM_BYTES[kind] for kind, shape in tensors.values())


def file_checksum(path: Path) -> str:
    """xxh3_128 of a file's bytes."""
    checksum = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 24):
            checksum.update(chunk)
    return checksum.hexdigest()
