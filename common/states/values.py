"""What a sample's states must be to be trained on: finite, no row of zeros, rows not all alike.

A row is one token's state after one layer. Every number is looked at for NaN and Inf, in pieces
that stay in the cache; a row of zeros shows in its first numbers, rows all alike in the first two.
So checking a sound file costs little beside reading it.

Shape suffixes: T tokens, L layers, H hidden size.
"""

import numpy as np

from common.states.files import FP8, StatesFormat

PIECE = 1 << 18  # bytes
FIRST = 32  # numbers of a row that are looked at before the complete row
# Raw bits of a number, and those of its exponent: all ones in NaN and Inf (float8_e4m3fn has no
# infinities, its NaN is all ones behind the sign).
BITS = {
    "float32": ("<u4", 0x7F800000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
    FP8: ("u1", 0x7F),
}


def all_finite(data: np.ndarray, dtype: str) -> bool:
    """Whether raw bytes (uint8) of a dtype hold finite numbers only."""
    kind, exponent = BITS[dtype]
    negative = exponent | 1 << 8 * np.dtype(kind).itemsize - 1
    for start in range(0, len(data), PIECE):
        bits = data[start : start + PIECE].view(kind)
        if bits.max() >= negative or bits.view(kind.replace("u", "i")).max() >= exponent:
            return False
    return True


def states_problem(
    data: np.ndarray, scale_TL: np.ndarray | None, form: StatesFormat, layers: list[int]
) -> str | None:
    """What is wrong with a sample's states, with token and layer; None where nothing is.

    Args:
        data: raw bytes (uint8) of hidden_states [T, L, H]; scale_TL: of float8 states.
        layers: their numbers.
    """
    if all_finite(data, form.dtype):
        return row_problem(data, scale_TL, form, layers)
    _, exponent = BITS[form.dtype]
    token, layer = next(
        (token, layer)
        for token, bits_LH in enumerate(bits_of(data, form))
        for layer, bits_H in zip(layers, bits_LH, strict=True)
        if ((bits_H & exponent) == exponent).any()
    )
    return f"its hidden states hold NaN or Inf (token {token}, layer {layer})"


def row_problem(
    data: np.ndarray, scale_TL: np.ndarray | None, form: StatesFormat, layers: list[int]
) -> str | None:
    """As states_problem, of states that are finite (the scales need not be)."""
    bits_TLH = bits_of(data, form)
    magnitude_TLH = bits_TLH[:, :, :FIRST] << 1  # without the sign
    zero_TL = ~magnitude_TLH.any(-1)
    if scale_TL is not None:
        if not np.isfinite(scale_TL).all():
            return "its scales hold NaN or Inf"
        zero_TL |= scale_TL == 0
    for token, at in np.argwhere(zero_TL):
        scaled = scale_TL is None or scale_TL[token, at] != 0
        if not (scaled and (bits_TLH[token, at] << 1).any()):
            return f"its hidden states hold a row of zeros (token {token}, layer {layers[at]})"
    for at, layer in enumerate(layers):
        scaled_alike = scale_TL is None or all_alike(scale_TL[:, at])
        if scaled_alike and all_alike(bits_TLH[:2, at]) and all_alike(bits_TLH[:, at]):
            return f"its hidden states are the same at all {len(bits_TLH)} tokens (layer {layer})"
    return None


def all_alike(rows: np.ndarray) -> bool:
    """Whether there are several rows, all equal."""
    return len(rows) > 1 and bool((rows == rows[0]).all())


def bits_of(data: np.ndarray, form: StatesFormat) -> np.ndarray:
    """Raw bytes of hidden_states as unsigned integers [T, L, H]."""
    return data.view(BITS[form.dtype][0]).reshape(-1, form.layers, form.hidden_size)
