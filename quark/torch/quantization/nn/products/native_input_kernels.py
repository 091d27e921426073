"""A kernel of numba that quantizes inputs, and dequantizes them, in one pass through the cache.

Each operation is the one of ``numerics`` (``scales``, ``exponents``, ``rounding``, ``qdq``), in
float32 and in the same order, so results have the same bits. A block is a row of whole vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import (
    Operand,
    native_array_instruction,
    native_function,
)
from quark.torch.quantization.nn.products.block_instructions import Blocks

Array = Any
SHARED, POWER, FLOAT, PLAIN = range(4)  # kinds of scales; see ``triton_inputs.Case``
_TILE = 256  # blocks whose scales are in the cache


@native_array_instruction
def _find_largest(
    builder: Any, ir: Any, x: Operand, largest: Operand, negative: Operand | None
) -> None:
    """Write the bits of the largest magnitudes of blocks; those of NaN are above all others.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        x: See ``Blocks``.
        largest: int32 (blocks,), overwritten.
        negative: The same of negative values alone, 0 where there are none; None if nobody asks.
    """
    blocks = Blocks(builder, ir, x)
    nothing = blocks.vectors.constants(0)

    def compare(index: Any, before: list[Any]) -> list[Any]:
        bits = blocks.bits(index)
        size = builder.and_(bits, blocks.vectors.constants(0x7FFFFFFF))
        below = builder.select(builder.icmp_signed("<", bits, nothing), size, nothing)
        return [blocks.larger(*pair) for pair in zip(before, (size, below), strict=False)]

    def write(block: Any) -> None:
        outputs = [largest] if negative is None else [largest, negative]
        found = blocks.each_vector(block, [nothing] * len(outputs), compare)
        for sizes, output in zip(found, outputs, strict=True):
            blocks.vectors.store(blocks.vectors.largest(sizes), output, block)

    blocks.each_block(x.shape[0], write)


@native_array_instruction
def _round_blocks(
    builder: Any,
    ir: Any,
    x: Operand,
    y: Operand,
    scale: Operand,
    inverse: Operand | None,
    grid: Operand,
) -> None:
    """Write quantized values of blocks.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        x: See ``Blocks``.
        y: In the same type and shape, overwritten.
        scale: Scales of the blocks, float32 (blocks,).
        inverse: Their reciprocals, by which values are multiplied; None divides by scales.
        grid: Of float codes, int32: see ``_round_to_scale``. Of integers, float32: the zero point
            that is added before values are rounded, the smallest and largest codes less a zero
            point that is added afterwards.
    """
    blocks = Blocks(builder, ir, x)
    vectors = blocks.vectors
    numbers = [vectors.spread(vectors.load_one(grid, vectors.constant(i))) for i in range(3)]
    round_ = blocks.round_floats if grid.kind == "int32" else blocks.round_integers

    def write_block(block: Any) -> None:
        by = vectors.spread(vectors.load_one(scale, block))
        factor = None if inverse is None else vectors.spread(vectors.load_one(inverse, block))

        def write(index: Any, _: list[Any]) -> list[Any]:
            values = blocks.as_floats(blocks.bits(index))
            scaled = builder.fdiv(values, by) if factor is None else builder.fmul(values, factor)
            codes = round_(scaled, *numbers)
            result = builder.fmul(codes, by)
            if y.kind == "int16":
                result = blocks.rounded_bits(result)
            vectors.store(result, y, index)
            return []

        blocks.each_vector(block, [], write)

    blocks.each_block(x.shape[0], write_block)


@native_function
def _power_of_two(exponent: int) -> Any:
    """Return 2^exponent for exponents from -149 to 127."""
    if exponent < -126:
        return np.int32(1 << (exponent + 149)).view(np.float32)
    return np.int32((exponent + 127) << 23).view(np.float32)


@native_function
def _round_to_scale(x: float, grid: Array) -> Any:
    """Round a positive number to a float format of scales, ties to even.

    Args:
        x: The number.
        grid: Bits of the largest value, bits of the smallest normal number, what is added to the
            exponent of a number to get that of 2^23 steps; int32.
    """
    bits = min(np.float32(x).view(np.int32), grid[0])
    rounder = np.int32(max(np.int32(bits & 0x7F800000), grid[1]) + grid[2]).view(np.float32)
    rounded = np.float32(np.float32(np.int32(bits).view(np.float32) + rounder) - rounder)
    return rounded if x == x else np.float32(x)


@native_function
def _scale_of(largest: int, unit: float, whole: Array, numbers: Array, grid: Array) -> Any:
    """Return the scale of a block with this largest magnitude, as ``numerics.scales`` does.

    Args:
        largest: Bits of the largest magnitude.
        unit: Tensor scale of two-level scales, 1 without.
        whole: See ``fake_quantize_rows``.
        numbers: See ``fake_quantize_rows``.
        grid: See ``_round_to_scale``.
    """
    if whole[0] == SHARED:
        bits = np.int64(min(largest, 0x7F800000)) + whole[2]
        exponent = ((bits >> 23) & 0xFF) - 127 - whole[3]
        if whole[1] and bits & 0x7FFFFF:  # rounds up
            exponent += 1
        exponent = min(max(exponent, -127), 127) - whole[4]
        return _power_of_two(min(exponent, whole[5]))
    amax = np.int32(largest).view(np.float32)
    reach, epsilon, smallest, most, top = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    scale = np.float32(amax / reach)
    is_least = amax == 0 if whole[6] else scale < epsilon  # of codes that are floats, or integers
    scale = epsilon if is_least else scale
    if whole[0] == POWER:
        scale = smallest if scale < smallest else scale
        bits = np.int64(np.float32(scale).view(np.int32)) + 0x4AFB0C
        scale = _power_of_two(((bits >> 23) & 0xFF) - 127)
    elif whole[0] == FLOAT:
        ratio = _round_to_scale(np.float32(scale / np.float32(unit)), grid)
        ratio = smallest if ratio < smallest else ratio
        scale = np.float32(ratio * np.float32(unit))
    else:
        scale = smallest if scale < smallest else scale
        scale = top if scale > top else scale
    return most if scale > most else scale


@native_function
def fake_quantize_rows(
    x: Array,
    y: Array,
    given: Array,
    unit: float,
    whole: Array,
    numbers: Array,
    scale_grid: Array,
    grid: Array,
    multiplies: Array | None,
    signs: Array | None,
) -> None:
    """Quantize and dequantize rows, which are the blocks.

    Args:
        x: Values, float32 or bits of bfloat16 (int16), (rows, elements): whole vectors.
        y: Results in the same type and shape, overwritten.
        given: Scale of all rows; empty computes one for each row from its largest magnitude.
        unit: Tensor scale of two-level scales, 1 without.
        whole: Integers of ``triton_inputs.Case``, int64: kind of scales, whether shared exponents
            are rounded up, half_unit, element_exponent, fraction_bits, largest_exponent, is_float.
        numbers: Numbers of it, float32: reach, epsilon, smallest_scale, largest_scale,
            largest_float32.
        scale_grid: Format of float scales; see ``_round_to_scale``.
        grid: See ``_round_blocks``.
        multiplies: Whether values are multiplied by reciprocals of scales: any array; None divides.
        signs: Whether scales are negative where the largest magnitude is that of positive values
            alone: any array; None leaves them positive.
    """
    largest, scale = np.empty(_TILE, np.int32), np.empty(_TILE, np.float32)
    inverse, negative = np.empty(_TILE, np.float32), np.empty(_TILE, np.int32)
    for start in range(0, x.shape[0], _TILE):
        tile, out = x[start : start + _TILE], y[start : start + _TILE]
        if given.shape[0]:
            scale[:] = given[0]
        else:
            if signs is None:
                _find_largest((tile, largest, None))
            else:
                _find_largest((tile, largest, negative))
            for row in range(tile.shape[0]):
                scale[row] = _scale_of(largest[row], unit, whole, numbers, scale_grid)
                if signs is not None and negative[row] < largest[row]:
                    scale[row] = -scale[row]
        if multiplies is None:
            _round_blocks((tile, out, scale, None, grid))
        else:
            for row in range(tile.shape[0]):
                inverse[row] = np.float32(np.float32(1.0) / scale[row])
            _round_blocks((tile, out, scale, inverse, grid))
