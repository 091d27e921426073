"""Kernels of numba for AVX2: products of packed weights and a few rows of inputs, by words.

A word has the codes of four inputs that follow each other, one in each byte. A vector of words is
read from the planes, and byte b of all words becomes a vector of float32 by a mask and a conversion
alone: it is 256^b times too large, and the inputs that it meets are as much smaller, which is
exact. So inputs are brought in this order first. The sum of a run is multiplied by its scale, after
the zero point times the sum of its inputs is subtracted: codes are never made signed. Sums are
short before that, so that little is lost where these cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    ArrayInstruction,
    Operand,
    native_array_instruction,
    native_by_type,
    native_function,
)
from quark.torch.numerics.native.vectors import Vectors
from quark.torch.quantization.nn.products.native_kernels import half_value

Array = Any
LANES = 8  # words of a vector of AVX2
BYTES = 4  # codes of a word
CHUNK = LANES * BYTES  # inputs that a vector of words meets
HALF = CHUNK // 2  # inputs of a group that meets half of a vector
_FLAGS = ("contract",)  # sums stay several chains, which do not wait for each other


class _Words:
    """Products of rows of codes and a few rows of inputs.

    Args:
        vectors: Instructions.
        operands: As of ``_multiply``.
    """

    def __init__(self, vectors: Vectors, operands: tuple[Operand | None, ...]) -> None:
        *planes, slots, factors, table, x, sums, y = operands
        assert planes[0] and slots and factors and x and sums and y
        builder, self.vectors = vectors.builder, vectors
        self.is_signed = planes[0].kind == "int8"
        self.planes = [plane._replace(kind="int32") for plane in planes if plane is not None]
        self.factors, self.x, self.sums, self.y = factors, x, sums, y
        self.rows, self.width = factors.shape[0], builder.udiv(x.shape[1], vectors.constant(BYTES))
        self.width = builder.mul(self.width, vectors.constant(LANES))
        self.firsts, self.slots = [], []
        for index in range(len(self.planes)):
            numbers = [vectors.load_one(slots, vectors.constant(4 * index + i)) for i in range(4)]
            self.firsts.append(numbers[0])
            words = (builder.trunc(number, vectors.int) for number in numbers[1:])
            self.slots.append([vectors.spread(number) for number in words])
        self.table = vectors.load(table, vectors.constant(0)) if table else None
        self.runs = sums.shape[1]

    def for_each(self, body: Callable[[Any], None]) -> None:
        """Repeat instructions for each row; they may read its words."""
        builder = self.vectors.builder

        def turn(row: Any, _: list[Any]) -> list[Any]:
            offset = builder.mul(row, self.width)
            self.starts = [builder.add(first, offset) for first in self.firsts]
            body(row)
            return []

        self.vectors.loop(self.vectors.constant(0), self.rows, 1, [], turn)

    def words(self, chunk: Any) -> Any:
        """Return a vector of words of the row: codes, or bytes that the table has for them."""
        vectors, builder, words = self.vectors, self.vectors.builder, None
        start = builder.mul(chunk, vectors.constant(LANES))
        for plane, first, slot in zip(self.planes, self.starts, self.slots, strict=True):
            shift, mask, below = slot
            part = vectors.load(plane, builder.add(first, start))
            if self.is_signed:
                return builder.xor(part, vectors.constants(0x80808080 - (1 << 32)))
            part = builder.and_(builder.lshr(part, shift), mask)
            words = part if words is None else builder.or_(words, builder.shl(part, below))
        return words if self.table is None else vectors.lookup_bytes(self.table, words)

    def numbers(self, words: Any) -> list[Any]:
        """Return four vectors of float32: byte b of all words, times 256^b, but the last as is."""
        vectors, builder = self.vectors, self.vectors.builder
        parts = [builder.and_(words, vectors.constants(0xFF << 8 * b)) for b in range(BYTES - 1)]
        parts.append(builder.lshr(words, vectors.constants(8 * (BYTES - 1))))
        return [builder.sitofp(part, vectors.of(vectors.float)) for part in parts]

    def scale(self, row: Any, which: int, run: Any, halves: bool) -> Any:
        """Return the scale (0) or zero point (1) of each word of a run."""
        vectors, builder = self.vectors, self.vectors.builder
        place = builder.add(builder.mul(row, vectors.constant(2)), vectors.constant(which))
        place = builder.add(builder.mul(place, self.factors.shape[2]), run)
        if not halves:
            return vectors.spread(vectors.load_one(self.factors, place))
        place = builder.add(place, run)  # two for each run
        return vectors.load_halves(self.factors, place)


def _multiply(each: int, count: int, halves: bool = False) -> ArrayInstruction:
    """Return an instruction that writes the products of rows of codes and rows of inputs.

    Args:
        each: Chunks of a run.
        count: Rows of inputs.
        halves: Whether each half of a vector has its own scale.
    """

    def build(builder: Any, ir: Any, *operands: Operand | None) -> None:
        vectors = Vectors(builder, ir, LANES)
        words = _Words(vectors, operands)

        def load(operand: Operand, of: int, index: Any) -> Any:
            size = builder.mul(operand.shape[1], vectors.constant(LANES))
            start = builder.mul(size, vectors.constant(of))
            place = builder.mul(index, vectors.constant(LANES))
            return vectors.load(operand, builder.add(start, place))

        add = partial(builder.fadd, flags=_FLAGS)

        def add_run(row: Any, run: Any, totals: list[Any]) -> list[Any]:
            sums: list[list[Any]] = [[None] * BYTES for _ in totals]
            for i in range(each):
                chunk = builder.add(builder.mul(run, vectors.constant(each)), vectors.constant(i))
                first = builder.mul(chunk, vectors.constant(BYTES))
                for b, numbers in enumerate(words.numbers(words.words(chunk))):
                    place = builder.add(first, vectors.constant(b))
                    for of, parts in enumerate(sums):
                        inputs = load(words.x, of, place)
                        product = builder.fmul(numbers, inputs, flags=_FLAGS)
                        at = b if count == 1 else 0
                        before = parts[at]
                        parts[at] = product if before is None else add(before, product)
            scale, zero = (words.scale(row, which, run, halves) for which in range(2))
            results = []
            for of, (total, parts) in enumerate(zip(totals, sums, strict=True)):
                whole = parts[0]
                for part in parts[1:] if count == 1 else ():
                    whole = add(whole, part)
                less = builder.fmul(zero, load(words.sums, of, run), flags=_FLAGS)
                whole = builder.fsub(whole, less, flags=_FLAGS)
                whole = builder.fmul(whole, scale, flags=_FLAGS)
                results.append(add(total, whole))
            return results

        def multiply(row: Any) -> None:
            zeros = [vectors.zeros] * count
            start, stop = vectors.constant(0), words.runs
            _, totals = vectors.loop(
                start, stop, 1, zeros, lambda run, totals: add_run(row, run, totals)
            )
            first = builder.mul(row, vectors.constant(count))
            for of, total in enumerate(totals):
                at = builder.add(first, vectors.constant(of))
                vectors.store(vectors.sum(total), words.y, at)

        words.for_each(multiply)

    return native_array_instruction(build)


# Rows of inputs, and chunks of a run. Operands: three planes, uint8 or int8 (panels, rows of
# bytes, inputs) or None. Where the rows lie in them (see ``_find_rows``), int64 (4, 4). Scales and
# zero points of the runs, float32 (rows, 2, runs), or two for each run. 16 bytes twice, int32 (8,),
# or None. Inputs and their sums, see ``_prepare``. Products, float32 (rows, 1 or 4), overwritten.
_one_1, _one_2, _one_4 = (_multiply(each, 1) for each in (1, 2, 4))
_four_1, _four_2, _four_4 = (_multiply(each, 4) for each in (1, 2, 4))
_one_halves, _four_halves = (_multiply(1, count, halves=True) for count in (1, 4))


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
def _fewest(plane: Array | None, rows: int) -> int:
    """Return the rows of bytes of a plane, or ``rows`` if that is less."""
    return rows if plane is None else min(rows, plane.shape[1])


@native_function
def _find_rows(
    plane: Array | None, panel: int, row: int, rows: int, slot: Array, next_: Array
) -> None:
    """Write where rows of codes lie in a plane, from one row on.

    Args:
        plane: See ``multiply_rows``.
        panel: The panel.
        row: First row.
        rows: Rows of a panel.
        slot: Index of the first word, places by which bytes are shifted down, mask, places by
            which codes are shifted up (given); int64 (4,).
        next_: The same of the next plane, to which the bits below are written.
    """
    if plane is not None:
        run = plane.shape[1]  # rows of a slot
        number, width = row // run, 8 * run // rows
        slot[0] = (panel * run + row - number * run) * (plane.shape[2] // 4)
        slot[1], slot[2] = number * width, ((1 << width) - 1) * 0x01010101
        next_[3] = slot[3] + width


@native_function
def _read_factors(stored: Array, unit: float, offset: float, factors: Array) -> None:
    """Write stored scales or zero points of rows for each run, times ``unit``, plus ``offset``."""
    each = factors.shape[1] // stored.shape[1]
    for row in range(stored.shape[0]):
        source, out = stored[row], factors[row]
        if each == 1:  # a loop that compilers make vector instructions of
            for i in range(source.shape[0]):
                out[i] = np.float32(_factor(source[i]) * np.float32(unit)) + np.float32(offset)
        else:
            for i in range(source.shape[0]):
                factor = np.float32(_factor(source[i]) * np.float32(unit)) + np.float32(offset)
                out[i * each : (i + 1) * each] = factor


@native_function
def _prepare(x: Array, words: Array, sums: Array) -> None:
    """Bring rows of inputs in the order of words.

    Args:
        x: float32 (rows, inputs).
        words: Inputs that bytes b of a vector of words meet, divided by 256^b for the first three,
            float32 (rows, chunks, 4, 8), overwritten.
        sums: Sums of the inputs that each word of a run meets, float32 (rows, runs, 8),
            overwritten.
    """
    each = words.shape[1] // sums.shape[1]
    sums[:] = 0.0
    for row in range(x.shape[0]):
        for chunk in range(words.shape[1]):
            inputs, out, total = x[row, 32 * chunk :], words[row, chunk], sums[row, chunk // each]
            for i in range(8):
                j = 4 * i
                total[i] += (inputs[j] + inputs[j + 1]) + (inputs[j + 2] + inputs[j + 3])
                out[0, i] = inputs[j]
                out[1, i] = inputs[j + 1] * np.float32(2.0**-8)
                out[2, i] = inputs[j + 2] * np.float32(2.0**-16)
                out[3, i] = inputs[j + 3]


@native_function
def _run(operands: Any, count: int, each: int) -> None:
    """Run the instruction for a number of rows of inputs, and of chunks of a run; 0: halves."""
    if count == 1:
        if each == 0:
            _one_halves(operands)
        elif each == 1:
            _one_1(operands)
        elif each == 2:
            _one_2(operands)
        else:
            _one_4(operands)
    elif each == 0:
        _four_halves(operands)
    elif each == 1:
        _four_1(operands)
    elif each == 2:
        _four_2(operands)
    else:
        _four_4(operands)


@native_function
def multiply_rows(
    first: Array,
    second: Array | None,
    third: Array | None,
    scale: Array,
    zeros: Array | None,
    y: Array,
    x: Array,
    table: Array | None,
    numbers: Array,
) -> None:
    """Multiply one or four rows of inputs by panels of rows.

    Args:
        first: Plane with the lowest bits, uint8 (panels, rows of bytes, inputs); int8 for codes of
            int8, which become unsigned by inverting their sign.
        second: Plane with the next bits, or None.
        third: Plane with the highest bits, or None.
        scale: Stored scales, (panels, rows, groups).
        zeros: Stored zero points, likewise, or None.
        y: Outputs, float32 (panels, rows of a panel, 1 or 4), overwritten.
        x: Inputs, float32 (1 or 4, inputs).
        table: Bytes that stand for the 16 codes, twice, as words: int32 (8,). None for integers.
        numbers: What scales are multiplied by, and zero points or what is added to them, float32.
    """
    rows, slots, chunks = y.shape[1], np.zeros((4, 4), np.int64), x.shape[1] // 32
    count = _fewest(first, _fewest(second, _fewest(third, rows)))  # rows under one slot
    has_halves, each = scale.shape[2] > chunks, 1
    while not has_halves and each < 4 and chunks // scale.shape[2] % (2 * each) == 0:
        each *= 2
    runs = chunks // each
    factors = np.empty((count, 2, 2 * runs if has_halves else runs), np.float32)
    factors[:, 1] = numbers[1]
    words = np.empty((x.shape[0], chunks, 4, 8), np.float32)
    sums = np.empty((x.shape[0], runs, 8), np.float32)
    _prepare(x, words, sums)
    lines = words.reshape(x.shape[0], chunks * 4, 8)
    for panel in range(y.shape[0]):
        for row in range(0, rows, count):
            slots[0, 3] = 0
            _find_rows(first, panel, row, rows, slots[0], slots[1])
            _find_rows(second, panel, row, rows, slots[1], slots[2])
            _find_rows(third, panel, row, rows, slots[2], slots[3])
            _read_factors(scale[panel, row : row + count], numbers[0], 0.0, factors[:, 0])
            if zeros is not None:
                _read_factors(zeros[panel, row : row + count], 1.0, numbers[1], factors[:, 1])
            own = y[panel, row : row + count]
            operands = (first, second, third, slots, factors, table, lines, sums, own)
            _run(operands, x.shape[0], 0 if has_halves else each)
