"""Kernels that find the range of runs: neighboring elements that share a scale.

A run is a row of an array of bits. Loops have no branches, and their integers have the width of the
bits, so that the compiler makes vector instructions of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function

Array = Any


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


@native_function
def find_largest_code(codes: Array, out: Array, mask: int) -> None:
    """Find the largest code of each run, of the bits in a mask alone.

    Args:
        codes: uint8 (runs, length).
        out: uint8 (runs,), overwritten.
        mask: Bits that count.
    """
    bits = np.uint8(mask)
    for run in range(codes.shape[0]):
        most = np.uint8(0)
        for i in range(codes.shape[1]):
            most = np.uint8(max(most, np.uint8(codes[run, i] & bits)))
        out[run] = most
