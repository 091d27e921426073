"""Instructions of LLVM on rows of codes and of values, for the kernels of ``native_vectors``.

A vector of codes is read from its planes and becomes values in registers, which are written or
multiplied at once. Codes of up to 4 bits are looked up in registers that hold the 16 values: one
instruction of AVX-512 gives 16 of them, one of AVX2 eight of one half of the table.

A strip holds inputs of ``STRIP`` tokens beside each other. The product of ``BLOCK`` rows of values
and a strip keeps its sums in 12 of the 16 registers of AVX2 (Goto and van de Geijn 2008,
section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quark.torch.numerics.native.compilation import Operand
from quark.torch.numerics.native.vectors import LANES, SUM_FLAGS, Vectors

BLOCK, STRIP = 6, 16  # rows of values and tokens that are multiplied at a time
_REGISTER, _TURNS = 8, 2  # float32 of a register of AVX2; inputs of a turn of the loop
_UNROLLED = 4  # sums of a row that do not wait for each other


class _Row:
    """Values of a row of codes, one vector after the other.

    Args:
        vectors: Instructions.
        operands: As of ``decode_row``, without ``values``.
    """

    def __init__(self, vectors: Vectors, operands: Sequence[Operand | None]) -> None:
        *planes, slots, zeros, factors, halves, table = operands
        assert planes[0] and slots and factors and table
        self.vectors, self.factors, self.kind = vectors, factors, table.kind
        self.runs, self.has_zeros = factors.shape[1], zeros is not None
        self.has_halves = halves is not None
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
        is_half = vectors.constant(int(self.has_halves))  # two runs in a vector
        run = builder.lshr(builder.shl(chunk, is_half), self.shift)
        if self.has_zeros:
            values = builder.fsub(values, self._factor(builder.add(run, self.runs)))
        return builder.fmul(values, self._factor(run))

    def _factor(self, place: Any) -> Any:
        """Return the scale or zero point of each element of a vector, given the first of them."""
        vectors = self.vectors
        if self.has_halves:
            return vectors.load_halves(self.factors, place)
        return vectors.spread(vectors.load_one(self.factors, place))

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
        """Return the values before scales multiply them, float32; see ``decode_row``."""
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


def decode_row(builder: Any, ir: Any, *operands: Operand | None) -> None:
    """Write the values of a row of codes.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        operands: Three planes, uint8 (panels, rows of bytes, inputs) or None. Where the row lies in
            them (see ``_find_row``), and in the first of the last four numbers the shift of
            ``_run_shift``, int64 (4, 4). Stored zero points, or None if there are none. Scales and
            zero points of the runs, float32 (2, runs). Any array if runs are halves of vectors,
            else None.
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


def sum_row(count: int) -> Callable[..., None]:
    """Return a builder of the products of a row of codes and some rows of inputs."""

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


def multiply_strip(builder: Any, ir: Any, *operands: Operand | None) -> None:
    """Add the products of ``BLOCK`` rows of values and a strip of inputs to sums.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        operands: Values, float32 (rows, inputs or more). A strip, float32 (inputs, ``STRIP``).
            Sums, float32 (``BLOCK``, ``STRIP``). Int64 (3,): the first row, the first input, and
            the end of the inputs, an even number of them.
    """
    values, strip, sums, part = operands
    assert values and strip and sums and part
    vectors = Vectors(builder, ir, _REGISTER)
    row, first, stop = (vectors.load_one(part, vectors.constant(i)) for i in range(3))
    starts = [
        builder.mul(builder.add(row, vectors.constant(i)), values.shape[1]) for i in range(BLOCK)
    ]
    parts = range(0, STRIP, _REGISTER)

    def add(index: Any, totals: list[Any]) -> list[Any]:
        for turn in range(_TURNS):
            at = builder.add(index, vectors.constant(turn))
            place = builder.mul(at, vectors.constant(STRIP))
            x = [vectors.load(strip, builder.add(place, vectors.constant(i))) for i in parts]
            results = []
            for i, total in enumerate(totals):
                which, of = divmod(i, len(x))
                if of == 0:
                    value = vectors.load_one(values, builder.add(starts[which], at))
                    spread = vectors.spread(value)
                product = builder.fmul(spread, x[of], flags=SUM_FLAGS)
                results.append(builder.fadd(total, product, flags=SUM_FLAGS))
            totals = results
        return totals

    _, totals = vectors.loop(first, stop, _TURNS, [vectors.zeros] * (BLOCK * len(parts)), add)
    for i, total in enumerate(totals):
        place = vectors.constant(i * _REGISTER)
        vectors.store(builder.fadd(vectors.load(sums, place), total), sums, place)
