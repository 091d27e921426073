"""Kernels of numba that quantize inputs whose blocks share exponents: MX6, MX9 and BFP16.

A vector is a block, so scales never leave registers. See ``native_input_kernels`` for other inputs,
and ``numerics.exponents`` for the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.torch.numerics.native.compilation import (
    ArrayInstruction,
    Operand,
    native_array_instruction,
    native_function,
)
from quark.torch.numerics.native.vectors import HALF, LANES
from quark.torch.quantization.nn.products.block_instructions import Blocks

Array = Any
_LOWEST = -149  # exponent of the smallest float32


class _Exponents:
    """The exponents of steps, one for each element of a block.

    Args:
        blocks: Loops over the blocks.
        whole: What is taken from the exponent of the largest value to get that of the step, and
            the largest exponent of a step, int32.
        grid: Zero, the smallest and the largest code, float32.
    """

    def __init__(self, blocks: Blocks, whole: Operand, grid: Operand) -> None:
        vectors = blocks.vectors
        self.blocks = blocks
        self.below, self.most = (
            vectors.spread(vectors.load_one(whole, vectors.constant(i))) for i in range(2)
        )
        self.codes = [vectors.spread(vectors.load_one(grid, vectors.constant(i))) for i in range(3)]

    def of_bits(self, bits: Any) -> Any:
        """Return the exponents of float32 numbers, plus 127."""
        vectors, builder = self.blocks.vectors, self.blocks.builder
        return builder.lshr(builder.shl(bits, vectors.constants(1)), vectors.constants(24))

    def micro(self, bits: Any) -> Any:
        """Return those of ``micro_exponents``, for two elements in a sub-block."""
        blocks, vectors, builder = self.blocks, self.blocks.vectors, self.blocks.builder
        sizes = self.of_bits(bits)
        others = blocks.ir.Constant(blocks.ints, [lane ^ 1 for lane in range(vectors.lanes)])
        own = blocks.larger(sizes, builder.shuffle_vector(sizes, sizes, others))
        top = vectors.spread(vectors.largest(own))
        is_less = builder.zext(builder.icmp_signed("<", own, top), blocks.ints)
        return builder.sub(builder.sub(top, is_less), self.below)

    def block(self, bits: Any) -> Any:
        """Return those of ``block_exponent``.

        Codes reach one step farther below zero than above, so no negative value is beyond them.
        """
        blocks, vectors, builder = self.blocks, self.blocks.vectors, self.blocks.builder
        top = vectors.spread(vectors.largest(self.of_bits(bits)))
        step = builder.sub(top, self.below)
        high = blocks.as_floats(vectors.spread(vectors.largest(bits)))  # negative if all are
        half = blocks.ir.Constant(blocks.floats, [0.5] * vectors.lanes)
        limit = builder.fadd(self.codes[2], half)  # a tie goes to the even code, which is beyond
        is_beyond = builder.fcmp_ordered(">=", builder.fdiv(high, self.power_of_two(step)), limit)
        return builder.add(step, builder.zext(is_beyond, blocks.ints))

    def power_of_two(self, exponent: Any) -> Any:
        """Return 2^exponent in float32, for exponents from -149 to 127."""
        blocks, vectors, builder = self.blocks, self.blocks.vectors, self.blocks.builder
        normal = builder.shl(builder.add(exponent, vectors.constants(127)), vectors.constants(23))
        place = builder.sub(exponent, vectors.constants(_LOWEST))
        small = builder.shl(vectors.constants(1), blocks.smaller(place, vectors.constants(22)))
        is_small = builder.icmp_signed("<", exponent, vectors.constants(-126))
        return blocks.as_floats(builder.select(is_small, small, normal))


def _round_blocks(lanes: int, steps: Callable[[_Exponents, Any], Any]) -> ArrayInstruction:
    """Return an instruction that writes quantized values of blocks of so many elements.

    Args:
        lanes: Elements of a block.
        steps: Returns the exponents of the steps of a block, given the bits of its values.
    """

    def build(builder: Any, ir: Any, x: Operand, y: Operand, whole: Operand, grid: Operand) -> None:
        blocks = Blocks(builder, ir, x, lanes)
        exponents = _Exponents(blocks, whole, grid)

        def write(index: Any, _: list[Any]) -> list[Any]:
            bits = blocks.bits(index)
            scale = exponents.power_of_two(blocks.smaller(steps(exponents, bits), exponents.most))
            scaled = builder.fdiv(blocks.as_floats(bits), scale)
            result = builder.fmul(blocks.round_integers(scaled, *exponents.codes), scale)
            kept = blocks.rounded_bits(result) if y.kind == "int16" else result
            blocks.vectors.store(kept, y, index)
            return []

        def write_row(row: Any) -> None:
            blocks.each_vector(row, [], write)

        blocks.each_block(x.shape[0], write_row)

    return native_array_instruction(build)


_round_micro_blocks = _round_blocks(LANES, _Exponents.micro)
_round_float_blocks = _round_blocks(HALF, _Exponents.block)  # 8 elements, as BFP16 has them


@native_function
def fake_quantize_micro_rows(x: Array, y: Array, whole: Array, grid: Array) -> None:
    """Quantize and dequantize rows of blocks with shared microexponents, 16 elements each.

    Args:
        x: Values, float32 or bits of bfloat16 (int16), (rows, elements): whole blocks.
        y: Results in the same type and shape, overwritten.
        whole: See ``_Exponents``.
        grid: See ``_Exponents``.
    """
    _round_micro_blocks((x, y, whole, grid))


@native_function
def fake_quantize_float_rows(x: Array, y: Array, whole: Array, grid: Array) -> None:
    """Quantize and dequantize rows of block floating point, 8 elements each.

    Args:
        x: See ``fake_quantize_micro_rows``.
        y: See ``fake_quantize_micro_rows``.
        whole: See ``_Exponents``.
        grid: See ``_Exponents``.
    """
    _round_float_blocks((x, y, whole, grid))
