"""Kernels that find the range of runs: neighboring elements that share a scale.

A run is a row of an array of bits. Loops have no branches, and their integers have the width of the
bits, so that the compiler makes vector instructions of them. It makes poor ones of short loops, so
runs of block formats, such as 32 elements, are compared by instructions that are written here.

Bits of positive floats are in the order of the floats. Negative ones are in the opposite order,
which inverting all bits but the sign corrects: the result is the key of a float.
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


@native_array_instruction
def _find_extreme_keys(builder: Any, ir: Any, x: Operand, lo: Operand, hi: Operand) -> None:
    """Write the smallest and the largest key of each run of at least a vector.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        x: Bits, int16 or int32 (runs, length).
        lo: Smallest keys, in the same type (runs,), overwritten.
        hi: Largest keys, likewise.
    """
    vectors = Vectors(builder, ir)
    runs, length = x.shape
    width = 8 * vectors.bytes(x)
    signs, others = (
        ir.Constant(vectors.of(ir.IntType(width)), [number] * LANES)
        for number in (width - 1, 2 ** (width - 1) - 1)
    )

    def keys(index: Any) -> Any:
        bits = vectors.load(x, index)
        return builder.xor(bits, builder.and_(builder.ashr(bits, signs), others))

    def write(run: Any, _: list[Any]) -> list[Any]:
        start = builder.mul(run, length)

        def compare(index: Any, known: list[Any]) -> list[Any]:
            found = keys(index)
            low = builder.select(builder.icmp_signed("<", found, known[0]), found, known[0])
            high = builder.select(builder.icmp_signed(">", found, known[1]), found, known[1])
            return [low, high]

        # The last vector comes first. It may have elements of the one before, which does no harm.
        end = builder.add(start, length)
        last, before = (builder.sub(end, vectors.constant(n)) for n in (LANES, 1))
        _, (low, high) = vectors.loop(start, before, LANES, [keys(last)] * 2, compare)
        vectors.store(vectors.smallest(low), lo, run)
        vectors.store(vectors.largest(high), hi, run)
        return []

    vectors.loop(vectors.constant(0), runs, 1, [], write)


@native_function
def find_extremes(x: Array, lo: Array, hi: Array, infinity: int) -> None:
    """Find the smallest and the largest value of each run of bfloat16, float16 or float32.

    Args:
        x: Bits, int16 or int32 (runs, length).
        lo: Bits of the smallest values, in the same type (runs,), overwritten; NaN if there is one
            in the run.
        hi: Bits of the largest values, likewise.
        infinity: Bits of infinity.
    """
    bits, sign = x.dtype.type, 8 * x.itemsize - 1
    nan = most = bits((1 << sign) - 1)
    if x.shape[1] >= LANES:
        _find_extreme_keys((x, lo, hi))
    else:
        for run in range(x.shape[0]):
            low, high = most, bits(~most)
            for i in range(x.shape[1]):
                key = bits(x[run, i] ^ bits(bits(x[run, i] >> sign) & most))
                low, high = bits(min(low, key)), bits(max(high, key))
            lo[run], hi[run] = low, high
    for run in range(x.shape[0]):
        low, high = lo[run], hi[run]
        is_nan = high > infinity or low < -infinity - 1
        low, high = nan if is_nan else low, nan if is_nan else high
        lo[run] = low ^ bits(bits(low >> sign) & most)
        hi[run] = high ^ bits(bits(high >> sign) & most)


@native_function
def find_largest_code(codes: Array, out: Array, mask: int) -> None:
    """Find the largest code of each run, of the bits in a mask alone.

    Args:
        codes: uint8 (runs, length).
        out: uint8 (runs,), overwritten.
        mask: Bits that count.
    """
    bits = np.uint8(mask)
    for run in range(codes.shape[0]):
        most = np.uint8(0)
        for i in range(codes.shape[1]):
            most = np.uint8(max(most, np.uint8(codes[run, i] & bits)))
        out[run] = most
