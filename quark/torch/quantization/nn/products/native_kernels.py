"""Kernels that numba compiles: values of packed weights, and their products with a few rows.

A row of codes is read from its planes, and its values are written or multiplied while they are in
the first cache. Loops have no branches, so that compilers make vector instructions of them. See
``arrangement`` for planes, and ``panels`` for values of floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    native_by_type,
    native_function,
    native_instruction,
    native_sum,
)

Array = Any
_FEW = 32  # elements that share a scale, below which scales are spread over the elements first


@native_instruction("uint8", "uint8", "uint8", "uint8")
def _slot_bits(builder: Any, ir: Any, byte: Any, shift: Any, mask: Any) -> Any:
    """Return (byte >> shift) & mask."""
    return builder.and_(builder.lshr(byte, shift), mask)


@native_instruction("uint8", "uint8", "uint8", "uint8")
def _joined_bits(builder: Any, ir: Any, below: Any, above: Any, places: Any) -> Any:
    """Return (above << places) | below."""
    return builder.or_(builder.shl(above, places), below)


@native_instruction("int16", "uint8", "int16", "int16")
def _half_bits(builder: Any, ir: Any, code: Any, top: Any, down: Any) -> Any:
    """Return ((code << top) >> down), with the places of the shift below the sign cleared."""
    short = ir.IntType(16)
    moved = builder.ashr(builder.shl(builder.zext(code, short), top), down)
    below = builder.lshr(ir.Constant(short, 0x7FFF), down)
    return builder.and_(moved, builder.or_(below, ir.Constant(short, -0x8000)))


@native_instruction("int64", "int64", "int64", "float32")
def _store_eight(builder: Any, ir: Any, start: Any, offset: Any, value: Any) -> Any:
    """Write a float32 eight times, from so many bytes after an address; return the address."""
    vector = ir.VectorType(ir.FloatType(), 8)
    place = builder.inttoptr(builder.add(start, offset), vector.as_pointer())
    lane = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
    builder.store(builder.shuffle_vector(lane, lane, zeros), place, align=4)
    return start


@native_instruction("float32", "int16")
def half_value(builder: Any, ir: Any, bits: Any) -> Any:
    """Return the float16 with these bits as float32."""
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


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


def _half(x):  # type: ignore[no-untyped-def]  # likewise
    return half_value(x)


def _integer(x):  # type: ignore[no-untyped-def]  # likewise
    return np.float32(np.int32(x))


@native_by_type
def _number(kind: str) -> Callable[..., Any]:
    """Return the function that makes a float32 of a code, or of the bits of a float16."""
    return {"uint8": _integer, "int16": _half}[kind]


def _yes(x):  # type: ignore[no-untyped-def]  # likewise
    return True


def _no(x):  # type: ignore[no-untyped-def]  # likewise
    return False


@native_by_type
def _holds_bits(kind: str) -> Callable[..., Any]:
    """Return the function that says whether an element stands for the bits of a bfloat16."""
    return {"int16": _yes, "float32": _no}[kind]


@native_function
def _read_factors(stored: Array, unit: float, offset: float, factors: Array) -> None:
    """Write stored scales or zero points as float32, times ``unit``, plus ``offset``."""
    for i in range(factors.shape[0]):
        factors[i] = np.float32(_factor(stored[i]) * np.float32(unit)) + np.float32(offset)


@native_function
def _read_plane(plane: Array, panel: int, row: int, rows: int, below: int, codes: Array) -> int:
    """Add the bits of a plane to the codes of a row.

    Args:
        plane: uint8 (panels, rows of bytes, inputs).
        panel: The panel.
        row: Row of the panel.
        rows: Rows of a panel.
        below: Bits of a code that lower planes hold.
        codes: uint8 (inputs,); overwritten if there are no lower planes.

    Returns:
        Bits of a code that this plane and lower planes hold.
    """
    run = plane.shape[1]  # rows of a slot
    width = 8 * run // rows
    slot = row // run
    source = plane[panel, row - slot * run]
    shift, mask = np.uint8(slot * width), np.uint8((1 << width) - 1)
    if below:
        for j in range(codes.shape[0]):
            bits = _slot_bits(source[j], shift, mask)
            codes[j] = _joined_bits(codes[j], bits, np.uint8(below))
    else:
        for j in range(codes.shape[0]):
            codes[j] = _slot_bits(source[j], shift, mask)
    return int(below + width)


@native_function
def _read_halves(codes: Array, top: int, down: int, halves: Array) -> None:
    """Write the bits of the float16 that a code becomes; see ``panels``.

    Args:
        codes: uint8 (inputs,).
        top: Places by which the sign moves to the top.
        down: Bits of the exponent of float16 that codes do not have.
        halves: int16 (inputs,), overwritten.
    """
    for j in range(codes.shape[0]):
        halves[j] = _half_bits(codes[j], np.int16(top), np.int16(down))


@native_function
def _write_values(codes: Array, scale: Array, zero: Array, values: Array) -> None:
    """Write (code - zero point) * scale for a row whose runs share a scale.

    Args:
        codes: Codes or bits of float16, (inputs,).
        scale: Scales, float32 (groups,).
        zero: Zero points, likewise.
        values: float32 (inputs,), overwritten.
    """
    group = codes.shape[0] // scale.shape[0]
    for i in range(scale.shape[0]):
        run, out = codes[i * group : (i + 1) * group], values[i * group : (i + 1) * group]
        times, less = scale[i], zero[i]
        for j in range(group):
            out[j] = (_number(run[j]) - less) * times


@native_function
def _spread_factors(factors: Array, spread: Array) -> None:
    """Write the scale or zero point of each element of a row."""
    group = spread.shape[0] // factors.shape[0]
    if group % 8 == 0:  # two stores in place of a loop of 16 turns
        start = spread.ctypes.data
        for i in range(factors.shape[0]):
            for j in range(i * group, (i + 1) * group, 8):
                _store_eight(start, 4 * j, factors[i])
    else:
        for j in range(spread.shape[0]):
            spread[j] = factors[j // group]


@native_function
def _write_products(codes: Array, scale: Array, zero: Array, values: Array) -> None:
    """Write the same for a row with a scale and a zero point for each element."""
    for j in range(codes.shape[0]):
        values[j] = (_number(codes[j]) - zero[j]) * scale[j]


@native_function
def _read_row(
    first: Array,
    second: Array,
    third: Array,
    scale: Array,
    zeros: Array,
    form: Array,
    numbers: Array,
    place: Array,
    scratch: Array,
    values: Array,
) -> None:
    """Write the values of a row, float32 (inputs,).

    Args:
        first: See ``decode_rows``.
        second: See ``decode_rows``.
        third: See ``decode_rows``.
        scale: See ``decode_rows``.
        zeros: See ``decode_rows``.
        form: See ``decode_rows``.
        numbers: See ``decode_rows``.
        place: The panel, the row of the panel, and the number of its rows.
        scratch: Buffers; see ``_make_scratch``.
        values: Overwritten.
    """
    panel, row, rows = place
    codes, halves, scales, points, spread = scratch
    below = _read_plane(first, panel, row, rows, 0, codes)
    if second is not None:
        below = _read_plane(second, panel, row, rows, below, codes)
    if third is not None:
        _read_plane(third, panel, row, rows, below, codes)
    flip, top, down = form[0], form[1], form[2]
    if flip:
        for j in range(codes.shape[0]):
            codes[j] ^= np.uint8(flip)
    _read_factors(scale[panel, row], numbers[0], 0.0, scales)
    if zeros is not None:
        _read_factors(zeros[panel, row], 1.0, numbers[1], points)
    if top:
        _read_halves(codes, top, down, halves)
    if codes.shape[0] < _FEW * scales.shape[0]:
        _spread_factors(scales, spread[0])
        if zeros is not None:
            _spread_factors(points, spread[1])
        if top:
            _write_products(halves, spread[0], spread[1], values)
        else:
            _write_products(codes, spread[0], spread[1], values)
    elif top:
        _write_values(halves, scales, points, values)
    else:
        _write_values(codes, scales, points, values)


@native_function
def _make_scratch(inputs: int, groups: int, zero: float) -> Array:
    """Return the buffers of a row, with one zero point for all elements.

    They are codes, bits of float16, scales, zero points, and both for each element.
    """
    points, spread = np.empty(groups, np.float32), np.empty((2, inputs), np.float32)
    points[:] = zero
    spread[:] = zero
    codes, halves = np.empty(inputs, np.uint8), np.empty(inputs, np.int16)
    return codes, halves, np.empty(groups, np.float32), points, spread


@native_function
def _write_row(line: Array, values: Array) -> None:
    """Write float32 numbers as they are, or as the bits of bfloat16."""
    bits = line.view(np.uint32)
    if _holds_bits(values[0]):
        for j in range(bits.shape[0]):
            # Ties to even: half of the last place is added, and its lowest bit.
            up = np.uint32(bits[j] + np.uint32(0x7FFF) + np.uint32((bits[j] >> 16) & 1))
            values[j] = np.int16(up >> 16)
    else:
        for j in range(bits.shape[0]):
            values[j] = line[j]


@native_function
def decode_rows(
    first: Array,
    second: Array,
    third: Array,
    scale: Array,
    zeros: Array,
    values: Array,
    form: Array,
    numbers: Array,
) -> None:
    """Write the values of panels of rows.

    Args:
        first: Plane with the lowest bits, uint8 (panels, rows of bytes, inputs).
        second: Plane with the next bits, or None.
        third: Plane with the highest bits, or None.
        scale: Stored scales, (panels, rows, groups).
        zeros: Stored zero points, likewise, or None.
        values: float32 or bits of bfloat16 (int16), (panels, rows, inputs), overwritten.
        form: Bits of codes that are inverted first (128 makes int8 unsigned, with the zero point
            128), and two shifts; see ``_read_halves``. They are 0 for integers.
        numbers: What scales are multiplied by, and what is added to zero points, float32.
    """
    scratch = _make_scratch(values.shape[2], scale.shape[2], numbers[1])
    line = np.empty(values.shape[2], np.float32)
    for panel in range(values.shape[0]):
        for row in range(values.shape[1]):
            place = (panel, row, values.shape[1])
            _read_row(first, second, third, scale, zeros, form, numbers, place, scratch, line)
            _write_row(line, values[panel, row])


@native_sum
def _multiply_row(values: Array, x: Array, y: Array) -> None:
    """Write the products of a row of a weight (inputs,) and x (rows, inputs): y (rows,)."""
    row = 0
    while row + 4 <= x.shape[0]:
        x0, x1, x2, x3 = x[row], x[row + 1], x[row + 2], x[row + 3]
        y0 = y1 = y2 = y3 = np.float32(0.0)
        for j in range(values.shape[0]):
            value = values[j]
            y0 += value * x0[j]
            y1 += value * x1[j]
            y2 += value * x2[j]
            y3 += value * x3[j]
        y[row], y[row + 1], y[row + 2], y[row + 3] = y0, y1, y2, y3
        row += 4
    while row < x.shape[0]:
        x0, y0 = x[row], np.float32(0.0)
        for j in range(values.shape[0]):
            y0 += values[j] * x0[j]
        y[row] = y0
        row += 1


@native_function
def multiply_rows(
    first: Array,
    second: Array,
    third: Array,
    scale: Array,
    zeros: Array,
    y: Array,
    x: Array,
    form: Array,
    numbers: Array,
) -> None:
    """Multiply a few rows of inputs by panels of rows, whose values stay in the first cache.

    Args:
        first: See ``decode_rows``.
        second: See ``decode_rows``.
        third: See ``decode_rows``.
        scale: See ``decode_rows``.
        zeros: See ``decode_rows``.
        y: Outputs, float32 (panels, rows of a panel, rows of inputs), overwritten.
        x: Inputs, float32 (rows, inputs).
        form: See ``decode_rows``.
        numbers: See ``decode_rows``.
    """
    scratch = _make_scratch(x.shape[1], scale.shape[2], numbers[1])
    line = np.empty(x.shape[1], np.float32)
    for panel in range(y.shape[0]):
        for row in range(y.shape[1]):
            place = (panel, row, y.shape[1])
            _read_row(first, second, third, scale, zeros, form, numbers, place, scratch, line)
            _multiply_row(line, x, y[panel, row])
