"""Instructions of LLVM on blocks of inputs, for the kernels that quantize these.

Each operation is the one of ``numerics`` (``exponents``, ``rounding``, ``qdq``), in float32, so
results have the same bits. Numba keeps the machine code of kernels until their own files change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quark.torch.numerics.native.compilation import Operand
from quark.torch.numerics.native.vectors import LANES, Vectors

# Adding 1.5 * 2^23 to a float32 below 2^22 rounds it to an integer, ties to even.
_ROUNDER = 1.5 * 2**23
_NAN = 0x7FC0  # bits of bfloat16


class Blocks:
    """Loops over the vectors of blocks.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        x: Values, float32 or bits of bfloat16 (int16), (blocks, elements).
        lanes: Elements of a vector.
    """

    def __init__(self, builder: Any, ir: Any, x: Operand, lanes: int = LANES) -> None:
        self.builder, self.ir, self.x = builder, ir, x
        self.vectors = Vectors(builder, ir, lanes)
        self.ints = self.vectors.of(self.vectors.int)
        self.floats = self.vectors.of(self.vectors.float)
        self.start = self.vectors.constant(0)

    def each_block(self, count: Any, body: Callable[[Any], None]) -> None:
        """Repeat instructions for each block, given its number."""

        def turn(block: Any, _: list[Any]) -> list[Any]:
            body(block)
            return []

        self.vectors.loop(self.start, count, 1, [], turn)

    def each_vector(
        self, block: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Repeat instructions for each vector of a block, given the index of its first element."""
        elements = self.x.shape[1]
        first = self.builder.mul(block, elements)
        stop = self.builder.add(first, elements)
        return self.vectors.loop(first, stop, self.vectors.lanes, carried, body)[1]

    def bits(self, index: Any) -> Any:
        """Return the bits of float32 values from an element on."""
        loaded = self.vectors.load(self.x, index)
        if self.x.kind == "float32":
            return self.builder.bitcast(loaded, self.ints)
        return self.builder.shl(self.builder.zext(loaded, self.ints), self.vectors.constants(16))

    def smaller(self, a: Any, b: Any) -> Any:
        """Return the smaller ones of int32."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def larger(self, a: Any, b: Any) -> Any:
        """Return the larger ones of int32."""
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def as_floats(self, bits: Any) -> Any:
        """Return the float32 numbers of bits."""
        return self.builder.bitcast(bits, self.floats)

    def as_bits(self, numbers: Any) -> Any:
        """Return the bits of float32 numbers."""
        return self.builder.bitcast(numbers, self.ints)

    def rounded_bits(self, numbers: Any) -> Any:
        """Return the bits of bfloat16 numbers, ties to even, also of subnormal numbers and NaN."""
        builder, bits = self.builder, self.as_bits(numbers)
        odd = builder.and_(
            builder.lshr(bits, self.vectors.constants(16)), self.vectors.constants(1)
        )
        up = builder.add(bits, builder.add(odd, self.vectors.constants(0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", numbers, numbers)
        kept = builder.select(is_nan, self.vectors.constants(_NAN << 16), up)
        short = self.vectors.of(self.vectors.short)
        return builder.trunc(builder.lshr(kept, self.vectors.constants(16)), short)

    def round_floats(self, x: Any, most: Any, least: Any, steps: Any) -> Any:
        """Return the nearest values of a float format; see ``native_input_kernels``."""
        builder, bits = self.builder, self.as_bits(x)
        sizes = builder.and_(bits, self.vectors.constants(0x7FFFFFFF))
        inside = self.smaller(sizes, most)
        exponent = self.larger(builder.and_(inside, self.vectors.constants(0x7F800000)), least)
        rounder = self.as_floats(builder.add(exponent, steps))
        whole = builder.fsub(builder.fadd(self.as_floats(inside), rounder), rounder)
        signed = builder.or_(self.as_bits(whole), builder.xor(bits, sizes))
        return builder.select(builder.fcmp_unordered("uno", x, x), x, self.as_floats(signed))

    def round_integers(self, x: Any, before: Any, low: Any, high: Any) -> Any:
        """Return the nearest integer codes less the zero point; see ``native_input_kernels``."""
        builder = self.builder
        rounder = self.ir.Constant(self.floats, [_ROUNDER] * self.vectors.lanes)
        x = builder.fadd(x, before)
        x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        return builder.fsub(builder.fsub(builder.fadd(x, rounder), rounder), before)
