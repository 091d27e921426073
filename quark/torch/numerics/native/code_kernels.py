"""Kernels that round runs to codes: neighboring elements that share a scale.

A run is a row of an array of float32, or of the bits of bfloat16 (int16) or float16 (uint16); see
``compilation.array``. Loops have no branches, so that the compiler makes vector instructions of
them.
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
def _scaled(x: Any, factor: Any, divides: bool) -> Any:
    return value(x) / factor if divides else value(x) * factor


@native_function
def round_to_integers(
    x: Array,
    out: Array,
    factor: Array,
    before: Array,
    after: Array,
    qmin: int,
    qmax: int,
    divides: bool,
) -> None:
    """Round runs to integer codes: clamp(round(x * factor + before) + after). NaN gives 0.

    Args:
        x: Values (runs, length).
        out: Codes in the same shape, overwritten.
        factor: Factor or divisor of each run, float32 (runs,).
        before: Zero points that are added before rounding, likewise.
        after: Zero points that are added after rounding, likewise: integers below 2^20.
        qmin: Smallest code.
        qmax: Largest code.
        divides: Whether values are divided.
    """
    for run in range(x.shape[0]):
        by, shift, zero = factor[run], before[run], after[run]
        least, most = np.float32(qmin) - zero, np.float32(qmax) - zero
        offset = np.int32(np.int32(zero) - _ROUNDER_BITS)
        for i in range(x.shape[1]):
            scaled = np.float32(_scaled(x[run, i], by, divides) + shift)
            inside = least if scaled < least else scaled
            inside = most if inside > most else inside
            code = np.int32(np.float32(inside + _ROUNDER).view(np.int32) + offset)
            out[run, i] = code if scaled == scaled else np.int32(0)


@native_function
def round_to_floats(
    x: Array,
    out: Array,
    factor: Array,
    bits: int,
    mantissa_bits: int,
    smallest: int,
    largest: int,
    nan: int,
    divides: bool,
) -> None:
    """Round runs to the codes of a signed float format, which saturates at its largest value.

    A code counts the steps from zero. Adding 2^23 steps to a float32 rounds it to whole steps, ties
    to even, which the lowest bits of the sum count. Example, fp4 (one bit of mantissa): 2.9 has the
    exponent 1 and the step 1. 2.9 + 2^23 = 8388611 = 2^23 + 3, and 2 codes lie below each exponent
    from 0 to 1, so the code is 2 (1 - 0) + 3 = 5.

    Args:
        x: Values (runs, length).
        out: Codes in the same shape, uint8, overwritten.
        factor: Factor or divisor of each run, float32 (runs,).
        bits: Width of a code.
        mantissa_bits: Bits of mantissa of the format.
        smallest: Bits of the smallest normal number of the format, as float32.
        largest: Bits of the largest value of the format, as float32.
        nan: Code of NaN, without its sign.
        divides: Whether values are divided.
    """
    # Shifts by a variable number would take integers of 64 bits, and halve the vectors. Products
    # of powers of two are exact.
    steps_per_bit = np.float32(2.0 ** (mantissa_bits - 23))
    sign_bit, nan_code = np.int32(1 << (bits - 1)), np.int32(nan)
    least, most = np.int32(smallest), np.int32(largest)
    to_steps = np.int32(np.int32(23 - mantissa_bits) << 23)
    for run in range(x.shape[0]):
        by = factor[run]
        for i in range(x.shape[1]):
            signed = np.float32(_scaled(x[run, i], by, divides)).view(np.int32)
            magnitude = np.int32(signed & 0x7FFFFFFF)
            inside = np.int32(min(magnitude, most))
            exponent = np.int32(max(np.int32(inside & 0x7F800000), least))
            rounder = np.int32(exponent + to_steps)
            total = np.float32(inside.view(np.float32) + rounder.view(np.float32))
            steps = np.int32(total.view(np.int32) - rounder)
            below = np.float32(np.float32(np.int32(exponent - least)) * steps_per_bit)
            code = np.int32(np.int32(below) + steps)
            code = nan_code if magnitude > 0x7F800000 else code
            out[run, i] = np.int32(code | (sign_bit if signed < 0 else np.int32(0)))
