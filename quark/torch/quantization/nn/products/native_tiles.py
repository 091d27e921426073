"""A kernel of numba that writes values of packed weights in tiles, as oneDNN multiplies bfloat16.

A tile has 64 outputs. It holds a pair of values of each of them, for two inputs that follow each
other, then the next pairs. A product reads it from the first to the last number. oneDNN copies a
weight in rows or columns to this order first. Weights in columns (see ``native_columns``) have
their outputs beside each other too. For weights in rows, the exchange of axes takes as long as the
copy. Numba keeps the machine code until this file changes, also if ``native_columns`` does.
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
from quark.torch.quantization.nn.products.native_columns import decode_group

Array = Any
TILE = 64  # outputs of a tile
PAIR = 2  # inputs of a pair


@native_array_instruction
def _join(builder: Any, ir: Any, *operands: Operand | None) -> None:
    """Write pairs of columns to tiles.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        operands: Columns, bits of bfloat16 (int16), (inputs, rows). Int64 (3,): the first pair,
            the end of the pairs, and the output that the first row makes. Tiles, see
            ``write_columns``.
    """
    columns, part, tiles = operands
    assert columns and part and tiles
    vectors = Vectors(builder, ir)
    first, stop, output = (vectors.load_one(part, vectors.constant(i)) for i in range(3))
    lanes, size, pairs = vectors.constant(LANES), vectors.constant(TILE), tiles.shape[1]
    none, blocks = vectors.constant(0), builder.udiv(columns.shape[1], lanes)
    high = vectors.constants(16)

    def write(pair: Any, _: list[Any]) -> list[Any]:
        column = builder.mul(builder.mul(pair, vectors.constant(PAIR)), columns.shape[1])

        def write_vector(block: Any, _: list[Any]) -> list[Any]:
            row = builder.mul(block, lanes)
            at = builder.add(output, row)
            place = builder.add(builder.mul(builder.udiv(at, size), pairs), pair)
            place = builder.add(builder.mul(place, size), builder.urem(at, size))
            low = builder.add(column, row)
            halves = [
                builder.zext(vectors.load(columns, start), vectors.of(vectors.int))
                for start in (low, builder.add(low, columns.shape[1]))
            ]
            vectors.store(builder.or_(halves[0], builder.shl(halves[1], high)), tiles, place)
            return []

        vectors.loop(none, blocks, 1, [], write_vector)
        return []

    vectors.loop(first, stop, 1, [], write)


@native_function
def write_columns(
    plane: Array, scale: Array, zeros: Array | None, numbers: Array, table: Array, tiles: Array
) -> None:
    """Write the values of panels to tiles.

    Args:
        plane: See ``native_columns.decode_columns``.
        scale: See ``native_columns.decode_columns``; groups have whole pairs.
        zeros: See ``native_columns.decode_columns``.
        numbers: Number of each panel in the tiles, int64 (panels,).
        table: See ``native_columns.decode_columns``.
        tiles: Pairs of bits of bfloat16, int32 (tiles, pairs, 64), overwritten.
    """
    group, rows = plane.shape[1] // scale.shape[2], 2 * plane.shape[2]
    values = np.empty((plane.shape[1], rows), np.int16)
    place, part = np.empty(5, np.int64), np.empty(3, np.int64)
    for panel in range(plane.shape[0]):
        place[0], place[1], part[2] = panel, 0, numbers[panel] * rows
        for index in range(scale.shape[2]):
            start, stop = index * group, (index + 1) * group
            place[2], place[3], place[4] = index, start, stop
            decode_group((plane, place, scale, zeros, table, values))
            part[0], part[1] = start // PAIR, stop // PAIR
            _join((values, part, tiles))
