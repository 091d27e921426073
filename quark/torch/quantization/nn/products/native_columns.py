"""A kernel of numba for weights in the order of the 4-bit kernel of torch: values of their panels.

A panel has two halves of rows. A byte holds a code of each half, and the bytes of a column follow
each other. So a vector of codes belongs to as many rows, each with its own scale, and values are
written by columns: the transposed weight, which torch multiplies as fast.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    Operand,
    native_array_instruction,
    native_function,
)
from quark.torch.numerics.native.vectors import LANES, Vectors

Array = Any
_BITS = 4


class _Columns:
    """The columns of a group: vectors of codes, under the same scales.

    Args:
        vectors: Instructions.
        operands: As of ``decode_group``.
    """

    def __init__(self, vectors: Vectors, operands: tuple[Operand | None, ...]) -> None:
        plane, place, scale, zeros, table, values = operands
        assert plane and place and scale and table and values
        builder, self.vectors = vectors.builder, vectors
        self.plane, self.values, self.half = plane, values, plane.shape[2]
        panel, output, group, self.first, self.stop = (
            vectors.load_one(place, vectors.constant(i)) for i in range(5)
        )
        self.table = vectors.load(table, vectors.constant(0))
        self.bytes = builder.mul(builder.mul(panel, plane.shape[1]), self.half)
        self.output = builder.mul(output, builder.mul(self.half, vectors.constant(2)))
        factors = [scale] if zeros is None else [scale, zeros]
        self.factors = []  # of the first half, then of the second
        for half in range(2):
            run = builder.add(builder.mul(panel, vectors.constant(2)), vectors.constant(half))
            run = builder.add(builder.mul(run, scale.shape[2]), group)
            run = builder.mul(run, self.half)
            self.factors.append((factors, run))

    def write(self, row: Any) -> None:
        """Write the values of a vector of bytes of each column, which begins at a row of a half."""
        vectors, builder = self.vectors, self.vectors.builder
        factors = [
            [vectors.load(factor, builder.add(run, row)) for factor in kept]
            for kept, run in self.factors
        ]
        fours = vectors.constants(_BITS), vectors.constants((1 << _BITS) - 1)

        def write(column: Any, _: list[Any]) -> list[Any]:
            start = builder.add(builder.mul(column, self.half), builder.add(self.bytes, row))
            codes = builder.zext(vectors.load(self.plane, start), vectors.of(vectors.int))
            place = builder.add(builder.mul(column, self.values.shape[1]), self.output)
            place = builder.add(place, row)
            for places, (scale, *zero) in zip(
                (builder.and_(codes, fours[1]), builder.lshr(codes, fours[0])), factors, strict=True
            ):
                values = vectors.lookup(self.table, places)
                values = builder.fsub(values, zero[0]) if zero else values
                values = builder.fmul(values, scale)
                if self.values.kind == "int16":
                    values = vectors.bfloat16_bits(values)
                vectors.store(values, self.values, place)
                place = builder.add(place, self.half)
            return []

        vectors.loop(self.first, self.stop, 1, [], write)


@native_array_instruction
def decode_group(builder: Any, ir: Any, *operands: Operand | None) -> None:
    """Write the values of a group of columns of a panel.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        operands: Plane, see ``decode_columns``. Place, int64 (5,): the panel, its number in the
            values, the group, its first column and the end of its columns. Scales, zero points or
            None, table and values, see ``decode_columns``.
    """
    vectors = Vectors(builder, ir)
    columns = _Columns(vectors, operands)

    def write(row: Any, _: list[Any]) -> list[Any]:
        columns.write(row)
        return []

    vectors.loop(vectors.constant(0), columns.half, LANES, [], write)


@native_function
def decode_columns(
    plane: Array, scale: Array, zeros: Array | None, numbers: Array, table: Array, values: Array
) -> None:
    """Write the values of panels.

    Args:
        plane: Bytes, uint8 (panels, inputs, rows of a half): whole vectors of rows.
        scale: Scales, float32 (panels, 2, groups, rows of a half).
        zeros: Zero points, likewise, or None.
        numbers: Number of each panel in the values, int64 (panels,).
        table: What scales multiply for each of 16 codes, less zero points, float32 (16,).
        values: float32 or bits of bfloat16 (int16), (inputs, rows of all panels), overwritten.
    """
    place, group = np.empty(5, np.int64), plane.shape[1] // scale.shape[2]
    for panel in range(plane.shape[0]):
        place[0], place[1] = panel, numbers[panel]
        for index in range(scale.shape[2]):
            place[2], place[3], place[4] = index, index * group, (index + 1) * group
            decode_group((plane, place, scale, zeros, table, values))
