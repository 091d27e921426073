"""Kernels over runs: neighboring elements that share a scale, one run in each row of an array.

Values are float32, or the bits of bfloat16 (int16) and float16 (uint16); see ``compilation.array``.
Loops have no branches and work on 32 bits, so that compilers make vector instructions of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_by_type, native_function

Array = Any
# Adding 1.5 * 2^23 to a float32 below 2^22 rounds it to an integer, ties to even, which its lowest
# bits then hold. Example: 2.5 + 12582912 = 12582914, whose bits are 0x4B400000 + 2.
_ROUNDER = np.float32(1.5 * 2**23)
_ROUNDER_BITS = np.int32(0x4B400000)


def _from_float32(x):  # type: ignore[no-untyped-def]  # numba reads the types of arguments
    return x


def _from_bfloat16(x):  # type: ignore[no-untyped-def]  # likewise
    return np.int32(np.int32(x) << 16).view(np.float32)


def _from_float16(x):  # type: ignore[no-untyped-def]  # likewise
    # The exponent moves by 112: a product, which is exact for subnormal numbers too. Infinity and
    # NaN have the exponent 31, which becomes 255.
    bits = np.int32(x) & 0x7FFF
    special = np.int32(0x7F800000) if bits >= 0x7C00 else np.int32(0)
    value = np.float32(np.int32(bits << 13).view(np.float32) * np.float32(2.0**112))
    bits = value.view(np.int32) | special | ((np.int32(x) & 0x8000) << 16)
    return np.int32(bits).view(np.float32)


@native_by_type
def value(kind: str) -> Callable[..., Any]:
    """Return the function that makes a float32 of an element."""
    return {"float32": _from_float32, "int16": _from_bfloat16, "uint16": _from_float16}[kind]


@native_function
def find_extremes_16(x: Array, lo: Array, hi: Array, infinity: int) -> None:
    """Find the smallest and the largest value of each run of bfloat16 or float16.

    Bits of positive floats are in the order of the floats. Negative ones are in the opposite order,
    which inverting all bits but the sign corrects.

    Args:
        x: Bits, int16 (runs, length).
        lo: Bits of the smallest values, int16 (runs,), overwritten; NaN if there is one in the run.
        hi: Bits of the largest values, likewise.
        infinity: Bits of infinity.
    """
    for run in range(x.shape[0]):
        low, high = np.int16(0x7FFF), np.int16(-0x8000)
        for i in range(x.shape[1]):
            bits = x[run, i]
            key = np.int16(bits ^ np.int16(np.int16(bits >> 15) & 0x7FFF))
            low, high = np.int16(min(low, key)), np.int16(max(high, key))
        if high > infinity or low < -infinity - 1:
            low = high = np.int16(0x7FFF)  # NaN
        lo[run] = low ^ np.int16(np.int16(low >> 15) & 0x7FFF)
        hi[run] = high ^ np.int16(np.int16(high >> 15) & 0x7FFF)


@native_function
def find_extremes_32(x: Array, lo: Array, hi: Array) -> None:
    """Find the smallest and the largest value of each run of float32; see ``find_extremes_16``.

    Args:
        x: Bits, int32 (runs, length).
        lo: Bits of the smallest values, int32 (runs,), overwritten; NaN if there is one in the run.
        hi: Bits of the largest values, likewise.
    """
    for run in range(x.shape[0]):
        low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(x.shape[1]):
            bits = x[run, i]
            key = np.int32(bits ^ np.int32(np.int32(bits >> 31) & 0x7FFFFFFF))
            low, high = np.int32(min(low, key)), np.int32(max(high, key))
        if high > 0x7F800000 or low < -0x7F800001:
            low = high = np.int32(0x7FFFFFFF)  # NaN
        lo[run] = low ^ np.int32(np.int32(low >> 31) & 0x7FFFFFFF)
        hi[run] = high ^ np.int32(np.int32(high >> 31) & 0x7FFFFFFF)
