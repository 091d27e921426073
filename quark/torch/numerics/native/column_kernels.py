"""A kernel of numba that rounds columns which compensate for errors; see ``leaf_rounding``.

Torch takes ten operations for a column, each over its rows alone. The kernel takes some rows of all
columns, which stay in the first cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function, native_instruction

Array = Any
_ROUNDER = np.float32(1.5 * 2**23)  # added and subtracted, it leaves the nearest integer
_ROWS = 256  # rows of a piece


@native_instruction("float32", "float32", "float32", "float32")
def _fused(builder: Any, ir: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return builder.fma(a, b, c)


@native_function
def round_columns(
    remaining: Array,
    current: Array,
    rounded: Array,
    errors: Array,
    factor: Array,
    scale: Array,
    inverse: Array,
    order: Array,
    low: float,
    high: float,
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
        order: Index of each column in the matrix, int64 (columns,).
        low: Smallest code.
        high: Largest code, both at most 2^22 in magnitude.
        fused: First rows, in which a product and a sum are rounded once.
    """
    least, most = np.float32(low), np.float32(high)
    for first in range(0, remaining.shape[1], _ROWS):
        rows = slice(first, min(first + _ROWS, remaining.shape[1]))
        whole = min(max(fused - first, 0), rows.stop - first)
        for i in range(remaining.shape[0]):
            column, error, values = remaining[i, rows], errors[i, rows], rounded[i, rows]
            given = current[i, rows]
            times, by, diagonal = scale[order[i], rows], inverse[order[i], rows], factor[i, i]
            for r in range(column.shape[0]):
                code = column[r] * by[r]
                code = least if code < least else code  # NaN stays
                code = most if code > most else code
                value = ((code + _ROUNDER) - _ROUNDER) * times[r]
                values[r] = value
                error[r] = (given[r] - value) / diagonal
            for j in range(i + 1, remaining.shape[0]):
                weight, later = -factor[i, j], remaining[j, rows]
                for r in range(whole):
                    later[r] = _fused(weight, error[r], later[r])
                for r in range(whole, later.shape[0]):
                    later[r] += weight * error[r]
