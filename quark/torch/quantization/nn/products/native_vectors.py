"""Kernels of vector instructions: values of packed weights, and their products.

They do what ``native_kernels`` does, in one pass without buffers, for groups of whole vectors or of
half vectors; see ``row_instructions``. Products with many rows of inputs decode some rows of the
weight, which stay in a cache, and multiply strips of inputs by these. Numba keeps the machine code
until this file changes, also if ``row_instructions`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    native_array_instruction,
    native_by_type,
    native_function,
)
from quark.torch.numerics.native.vectors import HALF, LANES
from quark.torch.quantization.nn.products.native_kernels import half_value
from quark.torch.quantization.nn.products.row_instructions import (
    BLOCK,
    STRIP,
    decode_row,
    multiply_strip,
    sum_row,
)

Array = Any
_VALUES = 1 << 17  # values of rows that are decoded together: half a megabyte
_RUN = 256  # inputs of a sum in registers: longer sums round more

# Operands as of ``decode_row``, without values; then inputs, float32 (1 or 4, inputs), and their
# products, float32 (1 or 4,), overwritten.
_multiply_one = native_array_instruction(sum_row(1))
_multiply_four = native_array_instruction(sum_row(4))
_decode_row = native_array_instruction(decode_row)
_multiply_strip = native_array_instruction(multiply_strip)


def _float32_factor(x):  # type: ignore[no-untyped-def]  # numba reads the types of arguments
    return x


def _bfloat16_factor(x):  # type: ignore[no-untyped-def]  # likewise
    return np.int32(np.int32(x) << 16).view(np.float32)


def _float16_factor(x):  # type: ignore[no-untyped-def]  # likewise
    return half_value(np.int16(x))


def _int8_factor(x):  # type: ignore[no-untyped-def]  # likewise
    return np.float32(x)


@native_by_type
def _factor(kind: str) -> Callable[..., Any]:
    """Return the function that makes a float32 of a stored scale or zero point."""
    return {
        "float32": _float32_factor,
        "int16": _bfloat16_factor,
        "uint16": _float16_factor,
        "int8": _int8_factor,
    }[kind]


@native_function
def _run_shift(vectors: int, groups: int) -> int:
    """Return the logarithm of the vectors in a run: as many as a power of two that share a scale.

    A whole row that shares a scale is one run, for which it is 63.
    """
    if groups == 1:
        return 63
    shift, each = 0, vectors // groups
    while each % 2 == 0:
        each, shift = each // 2, shift + 1
    return shift


@native_function
def _make_factors(inputs: int, groups: int, halves: Array | None, slots: Array) -> Array:
    """Return a buffer for scales and zero points of the runs of a row; write their shift.

    Args:
        inputs: Elements of the row.
        groups: Number of scales of the row.
        halves: See ``decode_rows``. Their runs are halves of vectors.
        slots: See ``decode_row``.
    """
    vectors = inputs // (LANES if halves is None else HALF)
    shift = _run_shift(vectors, groups)
    slots[3, 0] = shift
    return np.empty((2, max(1, vectors >> shift)), np.float32)


@native_function
def _read_factors(stored: Array, unit: float, offset: float, factors: Array) -> None:
    """Write stored scales or zero points for each run, times ``unit``, plus ``offset``."""
    each = factors.shape[0] // stored.shape[0]
    if each == 1:  # a loop that compilers make vector instructions of
        for i in range(stored.shape[0]):
            factors[i] = np.float32(_factor(stored[i]) * np.float32(unit)) + np.float32(offset)
    else:
        for i in range(stored.shape[0]):
            factor = np.float32(_factor(stored[i]) * np.float32(unit)) + np.float32(offset)
            for j in range(i * each, (i + 1) * each):
                factors[j] = factor


@native_function
def _find_row(
    plane: Array | None, panel: int, row: int, rows: int, slot: Array, next_: Array
) -> None:
    """Write where a row of codes lies in a plane.

    Args:
        plane: See ``decode_rows``.
        panel: The panel.
        row: Row of the panel.
        rows: Rows of a panel.
        slot: Index of its first byte, places by which bytes are shifted down, mask, places by
            which codes are shifted up (given); int64 (4,).
        next_: The same of the next plane, to which the bits below are written.
    """
    if plane is not None:
        run = plane.shape[1]  # rows of a slot
        number, width = row // run, 8 * run // rows
        slot[0] = (panel * run + row - number * run) * plane.shape[2]
        slot[1], slot[2], next_[3] = number * width, (1 << width) - 1, slot[3] + width


@native_function
def _read_row(
    first: Array,
    second: Array | None,
    third: Array | None,
    scale: Array,
    zeros: Array | None,
    numbers: Array,
    panel: int,
    row: int,
    rows: int,
    slots: Array,
    factors: Array,
) -> None:
    """Write where a row lies in planes, and the scales and zero points of its vectors.

    Args:
        first: See ``decode_rows``.
        second: See ``decode_rows``.
        third: See ``decode_rows``.
        scale: See ``decode_rows``.
        zeros: See ``decode_rows``.
        numbers: See ``decode_rows``.
        panel: The panel.
        row: Row of the panel.
        rows: Rows of a panel.
        slots: See ``decode_row``; int64 (4, 4), overwritten.
        factors: See ``decode_row``; overwritten.
    """
    slots[0, 3] = 0
    _find_row(first, panel, row, rows, slots[0], slots[1])
    _find_row(second, panel, row, rows, slots[1], slots[2])
    _find_row(third, panel, row, rows, slots[2], slots[3])
    _read_factors(scale[panel, row], numbers[0], 0.0, factors[0])
    if zeros is not None:
        _read_factors(zeros[panel, row], 1.0, numbers[1], factors[1])


@native_function
def decode_rows(
    first: Array,
    second: Array | None,
    third: Array | None,
    scale: Array,
    zeros: Array | None,
    values: Array,
    table: Array,
    numbers: Array,
    halves: Array | None,
) -> None:
    """Write the values of panels of rows.

    Args:
        first: Plane with the lowest bits, uint8 (panels, rows of bytes, inputs).
        second: Plane with the next bits, or None.
        third: Plane with the highest bits, or None.
        scale: Stored scales, (panels, rows, groups).
        zeros: Stored zero points, likewise, or None.
        values: float32 or bits of bfloat16 (int16), (panels, rows, inputs), overwritten.
        table: See ``decode_row``.
        numbers: What scales are multiplied by, and what is added to zero points, float32.
        halves: Any array if groups are odd numbers of half vectors; None for whole vectors.
    """
    rows, slots = values.shape[1], np.zeros((4, 4), np.int64)
    factors = _make_factors(values.shape[2], scale.shape[2], halves, slots)
    for panel in range(values.shape[0]):
        for row in range(rows):
            _read_row(first, second, third, scale, zeros, numbers, panel, row, rows, slots, factors)
            _decode_row(
                (first, second, third, slots, zeros, factors, halves, table, values[panel, row])
            )


@native_function
def multiply_rows(
    first: Array,
    second: Array | None,
    third: Array | None,
    scale: Array,
    zeros: Array | None,
    y: Array,
    x: Array,
    table: Array,
    numbers: Array,
    halves: Array | None,
    narrowest: int,
) -> None:
    """Multiply one or four rows of inputs by panels of rows.

    Args:
        first: See ``decode_rows``.
        second: See ``decode_rows``.
        third: See ``decode_rows``.
        scale: See ``decode_rows``.
        zeros: See ``decode_rows``.
        y: Outputs, float32 (panels, rows of a panel, 1 or 4), overwritten.
        x: Inputs, float32 (1 or 4, inputs).
        table: See ``decode_row``.
        numbers: See ``decode_rows``.
        halves: See ``decode_rows``.
        narrowest: Bits of a code in the plane that has the fewest.
    """
    rows, slots = y.shape[1], np.zeros((4, 4), np.int64)
    factors = _make_factors(x.shape[1], scale.shape[2], halves, slots)
    sharing = 8 // narrowest  # rows that share a byte follow each other
    for panel in range(y.shape[0]):
        for index in range(rows):
            line = index // sharing
            row = line + (index - line * sharing) * (rows // sharing)
            _read_row(first, second, third, scale, zeros, numbers, panel, row, rows, slots, factors)
            operands = (
                first,
                second,
                third,
                slots,
                zeros,
                factors,
                halves,
                table,
                x,
                y[panel, row],
            )
            if x.shape[0] == 1:
                _multiply_one(operands)
            else:
                _multiply_four(operands)


@native_function
def write_strips(strips: Array, places: Array, x: Array) -> None:
    """Write inputs in strips, with zeros after the last token.

    Args:
        strips: float32 (strips, inputs, ``STRIP``), overwritten.
        places: Number of each strip in ``x``, int64 (strips,): they follow each other.
        x: Inputs, float32, bits of bfloat16 (int16) or of float16 (uint16), (tokens, inputs).
    """
    for strip in range(strips.shape[0]):
        first = (places[0] + strip) * STRIP
        count = min(STRIP, x.shape[0] - first)
        if count < STRIP:
            strips[strip] = 0
        for start in range(0, x.shape[1], LANES):  # lines of the cache are written whole
            for token in range(count):
                for i in range(start, start + LANES):
                    strips[strip, i, token] = _factor(x[first + token, i])


@native_function
def multiply_strips(
    first: Array,
    second: Array | None,
    third: Array | None,
    scale: Array,
    zeros: Array | None,
    places: Array,
    rows: int,
    strips: Array,
    y: Array,
    table: Array,
    numbers: Array,
    halves: Array | None,
) -> None:
    """Multiply strips of inputs by panels of rows.

    Args:
        first: See ``decode_rows``.
        second: See ``decode_rows``.
        third: See ``decode_rows``.
        scale: See ``decode_rows``.
        zeros: See ``decode_rows``.
        places: Number of each panel in ``y``, int64 (panels,): they follow each other.
        rows: Rows of a panel.
        strips: See ``write_strips``.
        y: Outputs, float32 (tokens, outputs), those of the panels overwritten.
        table: See ``decode_row``.
        numbers: See ``decode_rows``.
        halves: See ``decode_rows``.
    """
    inputs, total = strips.shape[1], scale.shape[0] * rows
    step = max(1, _VALUES // inputs // BLOCK) * BLOCK
    size = min(step, -(-total // BLOCK) * BLOCK)
    values = np.empty((size, inputs + LANES), np.float32)  # rows share no sets of the cache
    sums, part = np.empty((BLOCK, STRIP), np.float32), np.zeros(3, np.int64)
    slots = np.zeros((4, 4), np.int64)
    factors = _make_factors(inputs, scale.shape[2], halves, slots)
    for start in range(0, total, step):
        count, output = min(step, total - start), places[0] * rows + start
        for i in range(count):
            panel = (start + i) // rows
            row = start + i - panel * rows
            _read_row(first, second, third, scale, zeros, numbers, panel, row, rows, slots, factors)
            _decode_row((first, second, third, slots, zeros, factors, halves, table, values[i]))
        for strip in range(strips.shape[0]):
            token = strip * STRIP
            for row in range(0, count, BLOCK):
                sums[:] = 0
                for begin in range(0, inputs, _RUN):
                    part[0], part[1], part[2] = row, begin, min(begin + _RUN, inputs)
                    _multiply_strip((values, strips[strip], sums, part))
                for i in range(min(STRIP, y.shape[0] - token)):
                    for j in range(min(BLOCK, count - row)):
                        y[token + i, output + row + j] = sums[j, i]
