"""Kernels of numba that round columns which compensate for errors; see ``leaf_rounding``.

Torch takes ten operations for a column, each over its rows alone. A kernel takes some rows of all
columns, which stay in the first cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function, native_instruction

Array = Any
_ROUNDER = np.float32(1.5 * 2**23)  # added and subtracted, it leaves the nearest integer
_SIGN = np.int32(-(1 << 31))  # bit of the sign
_ROWS = 256  # rows of a piece


@native_instruction("float32", "float32", "float32", "float32")
def _fused(builder: Any, ir: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return builder.fma(a, b, c)


@native_function
def _with_sign(x: Any, other: Any) -> Any:
    """Return a number of float32 that is not negative with the sign of another."""
    sign = np.int32(np.float32(other).view(np.int32) & _SIGN)
    return np.int32(np.float32(x).view(np.int32) | sign).view(np.float32)


@native_function
def _compensate(
    remaining: Array,
    given: Array,
    values: Array,
    errors: Array,
    factor: Array,
    i: int,
    first: int,
    whole: int,
) -> None:
    """Store the errors of some rows of a column, and change these rows of the columns behind it.

    Args:
        remaining: See ``Columns``.
        given: Values of these rows from which errors count, (rows,).
        values: Their rounded values, likewise.
        errors: See ``Columns``.
        factor: Upper triangular factor, float32 (columns, columns).
        i: The column.
        first: The first row.
        whole: Rows, counted from the first, in which a product and a sum are rounded once.
    """
    rows = slice(first, first + values.shape[0])
    error, diagonal = errors[i, rows], factor[i, i]
    for r in range(values.shape[0]):
        error[r] = (given[r] - values[r]) / diagonal
    for j in range(i + 1, remaining.shape[0]):
        weight, later = -factor[i, j], remaining[j, rows]
        for r in range(whole):
            later[r] = _fused(weight, error[r], later[r])
        for r in range(whole, later.shape[0]):
            later[r] += weight * error[r]


@native_function
def _nearest_integers(
    column: Array,
    values: Array,
    times: Array,
    by: Array,
    zero: Array | None,
    low: float,
    high: float,
    adds_first: bool,
) -> None:
    """Write the values of the nearest codes of some rows; see ``round_columns_to_integers``."""
    least, most = np.float32(low), np.float32(high)
    below, above = np.float32(low - 1), np.float32(high + 1)
    if zero is None:
        for r in range(column.shape[0]):
            code = column[r] * by[r]
            code = least if code < least else code  # NaN stays
            code = most if code > most else code
            values[r] = ((code + _ROUNDER) - _ROUNDER) * times[r]
    elif adds_first:
        for r in range(column.shape[0]):
            code = column[r] * by[r] + zero[r]
            code = below if code < below else code
            code = above if code > above else code
            nearest = (code + _ROUNDER) - _ROUNDER
            # Torch has -0 for small numbers below zero. It stays if the zero point is 0.
            nearest = _with_sign(nearest, code) if nearest == 0 else nearest
            nearest = least if nearest < least else nearest
            nearest = most if nearest > most else nearest
            values[r] = (nearest - zero[r]) * times[r]
    else:
        for r in range(column.shape[0]):
            code, least_of, most_of = column[r] * by[r], least - zero[r], most - zero[r]
            code = least_of if code < least_of else code
            code = most_of if code > most_of else code
            values[r] = ((code + _ROUNDER) - _ROUNDER) * times[r]


@native_function
def round_columns_to_integers(
    remaining: Array,
    current: Array,
    rounded: Array,
    errors: Array,
    factor: Array,
    scale: Array,
    inverse: Array,
    zeros: Array | None,
    order: Array,
    low: float,
    high: float,
    adds_first: bool,
    fused: int,
) -> None:
    """Round columns to integers one by one; each changes the columns behind it.

    Args:
        remaining: Values in the order of rounding, float32 (columns, rows), changed.
        current: Values from which errors count, likewise; may be ``remaining``.
        rounded: Gets the rounded values, likewise.
        errors: Gets the errors, likewise.
        factor: Upper triangular factor of these columns, float32 (columns, columns).
        scale: Scales of every value of the matrix, float32 (columns of the matrix, rows).
        inverse: Reciprocals of the scales, likewise.
        zeros: Zero points, likewise, or None.
        order: Index of each column in the matrix, int64 (columns,).
        low: Smallest code.
        high: Largest code, both at most 2^22 in magnitude.
        adds_first: Whether zero points have a fraction and are added before rounding.
        fused: First rows, in which a product and a sum are rounded once.
    """
    for first in range(0, remaining.shape[1], _ROWS):
        rows = slice(first, min(first + _ROWS, remaining.shape[1]))
        whole = min(max(fused - first, 0), rows.stop - first)
        for i in range(remaining.shape[0]):
            column, values = remaining[i, rows], rounded[i, rows]
            given = scale[order[i], rows], inverse[order[i], rows]
            if zeros is None:
                _nearest_integers(column, values, *given, None, low, high, adds_first)
            else:
                zero = zeros[order[i], rows]
                _nearest_integers(column, values, *given, zero, low, high, adds_first)
            _compensate(remaining, current[i, rows], values, errors, factor, i, first, whole)


@native_function
def round_columns_to_floats(
    remaining: Array,
    current: Array,
    rounded: Array,
    errors: Array,
    factor: Array,
    scale: Array,
    order: Array,
    mantissa_bits: int,
    smallest: int,
    largest: int,
    fused: int,
) -> None:
    """Round columns to a signed float format; see ``round_columns_to_integers``.

    Adding 2^23 steps to a float32 and subtracting them rounds it to whole steps, ties to even.

    Args:
        remaining: Values in the order of rounding, float32 (columns, rows), changed.
        current: Values from which errors count, likewise; may be ``remaining``.
        rounded: Gets the rounded values, likewise.
        errors: Gets the errors, likewise.
        factor: Upper triangular factor of these columns, float32 (columns, columns).
        scale: Scales of every value of the matrix, float32 (columns of the matrix, rows).
        order: Index of each column in the matrix, int64 (columns,).
        mantissa_bits: Bits of mantissa of the format.
        smallest: Bits of its smallest normal number, as float32.
        largest: Bits of its largest value, as float32.
        fused: First rows, in which a product and a sum are rounded once.
    """
    least, most = np.int32(smallest), np.int32(largest)
    to_steps = np.int32(np.int32(23 - mantissa_bits) << 23)
    for first in range(0, remaining.shape[1], _ROWS):
        rows = slice(first, min(first + _ROWS, remaining.shape[1]))
        whole = min(max(fused - first, 0), rows.stop - first)
        for i in range(remaining.shape[0]):
            column, values, times = remaining[i, rows], rounded[i, rows], scale[order[i], rows]
            for r in range(column.shape[0]):
                ratio = np.float32(column[r] / times[r])
                bits = ratio.view(np.int32)
                magnitude = np.int32(bits & 0x7FFFFFFF)
                inside = np.int32(min(magnitude, most))
                exponent = np.int32(max(np.int32(inside & 0x7F800000), least))
                steps = np.int32(exponent + to_steps).view(np.float32)
                value = np.float32(np.float32(inside.view(np.float32) + steps) - steps)
                value = ratio if magnitude > 0x7F800000 else _with_sign(value, ratio)
                values[r] = value * times[r]
            _compensate(remaining, current[i, rows], values, errors, factor, i, first, whole)
