"""Kernels of vector instructions: values of packed weights, and their products with a few rows.

They do what ``native_kernels`` does, in one pass without buffers, for groups of whole vectors. A
vector of codes is read from its planes, becomes values in registers, and these are written or
multiplied at once. Codes of up to 4 bits are looked up in registers that hold the 16 values: one
instruction of AVX-512 gives 16 of them, one of AVX2 eight of one half of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    Operand,
    native_array_instruction,
    native_by_type,
    native_function,
)
from quark.torch.numerics.native.vectors import LANES, SUM_FLAGS, Vectors
from quark.torch.quantization.nn.products.native_kernels import half_value

Array = Any
_UNROLLED = 4  # sums of a row that do not wait for each other


class _Row:
    """Values of a row of codes, one vector after the other.

    Args:
        vectors: Instructions.
        operands: As of ``_decode_row``, without ``values``.
    """

    def __init__(self, vectors: Vectors, operands: Sequence[Operand | None]) -> None:
        *planes, slots, zeros, factors, table = operands
        assert planes[0] and slots and factors and table
        self.vectors, self.factors, self.kind = vectors, factors, table.kind
        self.runs, self.has_zeros = factors.shape[1], zeros is not None
        self.count = vectors.builder.udiv(planes[0].shape[2], vectors.constant(LANES))
        self.shift = vectors.load_one(slots, vectors.constant(12))
        self.planes = [plane for plane in planes if plane is not None]
        kind = vectors.short if table.kind == "int16" else vectors.int
        self.codes = vectors.of(kind)
        self.starts = [vectors.load_one(slots, vectors.constant(4 * p)) for p in range(3)]
        self.slots = [self._numbers(slots, 4 * p + 1, kind) for p in range(len(self.planes))]
        self.table = (
            vectors.load(table, vectors.constant(0))
            if table.kind == "float32"
            else self._numbers(table, 0, kind)
        )

    def _numbers(self, operand: Operand, start: int, kind: Any) -> list[Any]:
        """Return three numbers of an array as vectors of the type of codes."""
        vectors, numbers = self.vectors, []
        for index in range(start, start + 3):
            number = vectors.load_one(operand, vectors.constant(index))
            is_wide = number.type.width > kind.width
            numbers.append(
                vectors.spread(vectors.builder.trunc(number, kind) if is_wide else number)
            )
        return numbers

    def values(self, chunk: Any) -> Any:
        """Return the values of a vector of codes, float32, given which one it is."""
        vectors, builder = self.vectors, self.vectors.builder
        values = self._units(self._bits(chunk))
        run = builder.lshr(chunk, self.shift)
        if self.has_zeros:
            place = builder.add(run, self.runs)
            values = builder.fsub(values, vectors.spread(vectors.load_one(self.factors, place)))
        return builder.fmul(values, vectors.spread(vectors.load_one(self.factors, run)))

    def _bits(self, chunk: Any) -> Any:
        vectors, builder = self.vectors, self.vectors.builder
        start = builder.mul(chunk, vectors.constant(LANES))
        bits = None
        for plane, first, slot in zip(self.planes, self.starts, self.slots, strict=False):
            shift, mask, below = slot
            part = builder.zext(vectors.load(plane, builder.add(first, start)), self.codes)
            if len(self.planes) > 1 or self.kind == "float32":  # else a byte is a code
                part = builder.and_(builder.lshr(part, shift), mask)
            bits = part if bits is None else builder.or_(bits, builder.shl(part, below))
        return bits

    def _units(self, bits: Any) -> Any:
        """Return what is multiplied by scales, float32; see ``_decode_row``."""
        vectors, builder, ir = self.vectors, self.vectors.builder, self.vectors.ir
        if self.kind == "float32":
            return vectors.lookup(self.table, bits)
        if self.kind == "int32":
            flip, zero, _ = self.table
            whole = builder.sub(builder.xor(bits, flip), zero)
            return builder.sitofp(whole, vectors.of(vectors.float))
        top, down, mask = self.table
        moved = builder.and_(builder.ashr(builder.shl(bits, top), down), mask)
        halves = builder.bitcast(moved, vectors.of(ir.HalfType()))
        return builder.fpext(halves, vectors.of(vectors.float))


@native_array_instruction
def _decode_row(builder: Any, ir: Any, *operands: Operand | None) -> None:
    """Write the values of a row of codes.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        operands: Three planes, uint8 (panels, rows of bytes, inputs) or None. Where the row lies in
            them (see ``_find_row``), and in the first of the last four numbers the shift of
            ``_run_shift``, int64 (4, 4). Stored zero points, or None if there are none. Scales and
            zero points of the runs, float32 (2, runs).
            A table: the 16 values of codes, float32; or for integers, int32: which bits are
            inverted, the zero point, 0; or for floats, int16: places by which the sign moves to
            the top, places by which a float16 is shifted down then, its mask.
            The values: float32 or bits of bfloat16 (int16), (inputs,), overwritten.
    """
    *given, values = operands
    assert values is not None
    vectors = Vectors(builder, ir)
    row = _Row(vectors, given)

    def write(chunk: Any, _: list[Any]) -> list[Any]:
        numbers = row.values(chunk)
        if values.kind == "int16":
            numbers = vectors.bfloat16_bits(numbers)
        vectors.store(numbers, values, builder.mul(chunk, vectors.constant(LANES)))
        return []

    vectors.loop(vectors.constant(0), row.count, 1, [], write)


def _sum_row(count: int) -> Callable[..., None]:
    """Return what builds the products of a row of codes and so many rows of inputs."""

    def build(builder: Any, ir: Any, *operands: Operand | None) -> None:
        *given, x, y = operands
        assert x is not None and y is not None
        vectors = Vectors(builder, ir)
        row = _Row(vectors, given)
        inputs = builder.mul(row.count, vectors.constant(LANES))

        def add(chunk: Any, sums: list[Any]) -> list[Any]:
            results = []
            for index, total in enumerate(sums):
                turn, of = divmod(index, count)
                if of == 0:
                    place = builder.add(chunk, vectors.constant(turn))
                    values, start = row.values(place), builder.mul(place, vectors.constant(LANES))
                at = builder.add(start, builder.mul(inputs, vectors.constant(of)))
                product = builder.fmul(values, vectors.load(x, at), flags=SUM_FLAGS)
                results.append(builder.fadd(total, product, flags=SUM_FLAGS))
            return results

        turns = _UNROLLED // count
        start, stop = vectors.constant(0), row.count
        start, sums = vectors.loop(start, stop, turns, [vectors.zeros] * _UNROLLED, add)
        totals = sums[:count]
        for index in range(count, _UNROLLED):
            of = index % count
            totals[of] = builder.fadd(totals[of], sums[index], flags=SUM_FLAGS)
        _, totals = vectors.loop(start, stop, 1, totals, add)
        for of, total in enumerate(totals):
            vectors.store(vectors.sum(total), y, vectors.constant(of))

    return build


# Operands as of ``_decode_row``, without values; then inputs, float32 (1 or 4, inputs), and their
# products, float32 (1 or 4,), overwritten.
_multiply_one = native_array_instruction(_sum_row(1))
_multiply_four = native_array_instruction(_sum_row(4))


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
def _make_factors(vectors: int, groups: int, slots: Array) -> Array:
    """Return a buffer for scales and zero points of the runs of a row; write their shift."""
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
        slots: See ``_decode_row``; int64 (4, 4), overwritten.
        factors: See ``_decode_row``; overwritten.
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
) -> None:
    """Write the values of panels of rows.

    Args:
        first: Plane with the lowest bits, uint8 (panels, rows of bytes, inputs).
        second: Plane with the next bits, or None.
        third: Plane with the highest bits, or None.
        scale: Stored scales, (panels, rows, groups).
        zeros: Stored zero points, likewise, or None.
        values: float32 or bits of bfloat16 (int16), (panels, rows, inputs), overwritten.
        table: See ``_decode_row``.
        numbers: What scales are multiplied by, and what is added to zero points, float32.
    """
    rows, slots = values.shape[1], np.zeros((4, 4), np.int64)
    factors = _make_factors(values.shape[2] // LANES, scale.shape[2], slots)
    for panel in range(values.shape[0]):
        for row in range(rows):
            _read_row(first, second, third, scale, zeros, numbers, panel, row, rows, slots, factors)
            _decode_row((first, second, third, slots, zeros, factors, table, values[panel, row]))


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
        table: See ``_decode_row``.
        numbers: See ``decode_rows``.
        narrowest: Bits of a code in the plane that has the fewest.
    """
    rows, slots = y.shape[1], np.zeros((4, 4), np.int64)
    factors = _make_factors(x.shape[1] // LANES, scale.shape[2], slots)
    sharing = 8 // narrowest  # rows that share a byte follow each other
    for panel in range(y.shape[0]):
        for index in range(rows):
            line = index // sharing
            row = line + (index - line * sharing) * (rows // sharing)
            _read_row(first, second, third, scale, zeros, numbers, panel, row, rows, slots, factors)
            operands = (first, second, third, slots, zeros, factors, table, x, y[panel, row])
            if x.shape[0] == 1:
                _multiply_one(operands)
            else:
                _multiply_four(operands)
