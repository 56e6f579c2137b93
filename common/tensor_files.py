"""Where the tensors of a safetensors file lie, read from its header alone.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from common.artifacts import decode_json
from common.errors import UserError


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
