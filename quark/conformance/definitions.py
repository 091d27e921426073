"""Results by definition: slow searches in float64, without code of ``quark.torch.numerics``.

Float64 holds every value here, every middle between two values and every difference exactly.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Format, TableFormat

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@cache
def magnitudes(fmt: Format) -> Array:
    """Return the finite magnitudes of a float format, ascending from the code 0.

    Exponent field e and mantissa field m stand for m * 2^(1 - bias - M) if e is 0, and for
    (2^M + m) * 2^(e - bias - M) otherwise, with M bits of mantissa and the bias
    2^(exponent bits - 1) - 1. Codes beyond the largest value are infinities and NaN.
    """
    codes = np.arange(1 << (fmt.exponent_bits + fmt.mantissa_bits))
    field, mantissa = codes >> fmt.mantissa_bits, codes % (1 << fmt.mantissa_bits)
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    whole = np.where(field > 0, (1 << fmt.mantissa_bits) + mantissa, mantissa)
    # The largest field of float16 and bfloat16 would be infinity: it is left out below.
    values: Array = np.ldexp(
        whole.astype(np.float64), np.maximum(field, 1) - bias - fmt.mantissa_bits
    )
    finite: Array = values[values <= fmt.max_value]
    return finite


@cache
def _grid(fmt: Format) -> tuple[Array, int]:
    """Return all values of a format, ascending, and the place of the code 0."""
    if isinstance(fmt, TableFormat):
        return np.array(fmt.values, dtype=np.float64), 0
    if not fmt.is_float:
        return np.arange(fmt.qmin, fmt.qmax + 1, dtype=np.float64), -fmt.qmin
    values = magnitudes(fmt)
    return (
        (np.concatenate([-values[:0:-1], values]), len(values) - 1) if fmt.signed else (values, 0)
    )


def nearest(x: torch.Tensor, fmt: Format, mode: RoundType = RoundType.half_even) -> torch.Tensor:
    """Return the values of a format that a rounding mode gives, float64 in the shape of ``x``.

    Values beyond the range saturate, NaN stays NaN, and a zero keeps the sign of the value in
    signed float formats.

    Args:
        x: Values, any float type.
        fmt: A float format, or integers of at most 16 bits.
        mode: Rounding mode.
    """
    grid, zero = _grid(fmt)
    exact = x.double().numpy()
    wide = np.clip(np.nan_to_num(exact, nan=0.0, posinf=np.inf, neginf=-np.inf), grid[0], grid[-1])
    low = np.searchsorted(grid, wide, "right") - 1
    high = np.minimum(low + 1, len(grid) - 1)
    below, above = wide - grid[low], grid[high] - wide
    if mode is RoundType.floor:
        place = low
    else:
        # Of two values as near: the even code, or the one with the larger magnitude.
        is_low = (low - zero) % 2 == 0
        if mode is RoundType.round:
            is_low = np.abs(grid[low]) > np.abs(grid[high])
        place = np.where((below < above) | ((below == above) & is_low), low, high)
    result = grid[place]
    if fmt.is_float and fmt.signed:
        result = np.where(result == 0, np.copysign(0.0, exact), result)
    return torch.from_numpy(np.where(np.isnan(exact), np.nan, result))


def block_exponents(amax: torch.Tensor, fmt: Format, mode: str, largest: float) -> torch.Tensor:
    """Return the exponents of the scales of MX blocks, int64 in the shape of ``amax``.

    They are floor(log2(amax)), rounded by a mode, minus the exponent of the largest element
    (OCP Microscaling 1.0, 6.3), from -127 to the largest under which no element exceeds
    ``largest``. Magnitudes below the smallest normal float32 count as zero.

    Args:
        amax: Largest magnitudes of blocks.
        fmt: Format of the elements.
        mode: ``floor``; ``ceil``: of the logarithm; ``even``: one more where amax rounds to the
            next power of two in the mantissa width of the elements.
        largest: Largest value of the type of the tensor.
    """
    wide = amax.double().numpy()
    exponent = np.frexp(wide)[1].astype(np.int64) - 1
    power = np.ldexp(1.0, exponent)
    if mode == "even":
        exponent = exponent + (wide >= power * (2 - 2.0 ** -(fmt.mantissa_bits + 1)))
    if mode == "ceil":
        exponent = exponent + (wide > power)
    exponent = np.where(wide < 2.0**-126, -127, exponent - _exponent(fmt.max_value))
    return torch.from_numpy(np.clip(exponent, -127, _exponent(largest / fmt.max_value)))


def blocks(x: torch.Tensor, fmt: Format, mode: str, largest: float) -> torch.Tensor:
    """Return values rounded in MX blocks, float64 in the shape of ``x``.

    Args:
        x: (blocks, elements).
        fmt: Format of the elements.
        mode: See ``block_exponents``.
        largest: See ``block_exponents``.
    """
    exponents = block_exponents(x.abs().amax(-1, keepdim=True), fmt, mode, largest)
    scale = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents)
    return nearest(x.double() / scale, fmt) * scale


def shared_exponent_blocks(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return values rounded to integers times a step of their block, float64 in the shape of ``x``.

    With E = floor(log2(amax)), or -127 where amax is below the smallest normal float32:

    - MX6 and MX9, blocks of 16: the step is 2^(E - bits + 2), half of it for a pair of values that
      are both below 2^E; codes are symmetric;
    - BFP16, blocks of 8: the step is 2^(E - 6), twice that where a code would be beyond the range,
      at most 2^120, under which every code is finite;
    - MXINT8, blocks of 32: the step is 2^(E - 6); E is one more where amax rounds to 2^(E + 1) in 9
      bits, those of subnormal steps counted from 2^-126.

    Args:
        x: (n), whole blocks one after the other.
        fmt: One of these formats.
    """
    wide = x.double().numpy().reshape(-1, fmt.block or 32)
    amax = np.abs(wide).max(-1, keepdims=True)
    exponent = np.where(amax < 2.0**-126, -127, np.frexp(amax)[1] - 1)
    top, low = (1 << (fmt.bits - 1)) - 1, -(1 << (fmt.bits - 1))
    if fmt.sub_block:
        pairs = np.abs(wide).reshape(len(wide), -1, fmt.sub_block).max(-1)
        gains = np.repeat((pairs < np.ldexp(1.0, exponent)) & (exponent > -127), fmt.sub_block, -1)
        step, low = np.ldexp(1.0, exponent - gains - fmt.bits + 2), -top
    elif fmt.block:
        step = np.ldexp(1.0, exponent - 6)
        codes = np.round(wide / step)
        is_beyond = (codes > top).any(-1, keepdims=True) | (codes < low).any(-1, keepdims=True)
        step = np.minimum(step * (1 + is_beyond), 2.0**120)
    else:
        half = np.ldexp(1.0, np.maximum(exponent, -126) - 9)
        exponent = np.minimum(exponent + (amax >= np.ldexp(2.0, exponent) - half), 127)
        step, low = np.ldexp(1.0, exponent - 6), -top
    values = np.clip(np.round(wide / step), low, top) * step + 0.0
    return torch.from_numpy(values).reshape(x.shape)


def signed_blocks(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return values rounded in blocks of ggml with signed scales, float64 in the shape of ``x``.

    The scale is m / -2^(bits - 1) in float16, with m the value of the largest magnitude, so that m
    has the lowest code; a value is the nearest code, ties to even, times the scale as stored.

    Args:
        x: (blocks, elements) float32.
        fmt: Signed integers.
    """
    wide = x.double().numpy()
    largest = np.take_along_axis(wide, np.abs(wide).argmax(-1, keepdims=True), -1)
    scale = (largest / -(1 << (fmt.bits - 1))).astype(np.float16).astype(np.float64)
    half = 1 << (fmt.bits - 1)
    return torch.from_numpy(np.clip(np.round(wide / scale), -half, half - 1) * scale)


def two_level_blocks(x: torch.Tensor, fmt: Format, scale_fmt: Format) -> torch.Tensor:
    """Return values rounded in blocks under two levels of scales, float32 in the shape of ``x``.

    Each step rounds to float32. The tensor scale is amax / (largest element * largest block
    scale); a block scale is amax of the block / largest element / tensor scale in ``scale_fmt``,
    at least its smallest value; an element is the nearest to x / (block scale * tensor scale).

    Args:
        x: (blocks, elements) float32.
        fmt: Format of the elements: fp4 for NVFP4.
        scale_fmt: Format of block scales: fp8_e4m3 for NVFP4.
    """
    wide = x.numpy()
    amax = np.abs(wide).max(-1, keepdims=True)
    top = np.float32(fmt.max_value * scale_fmt.max_value)
    tensor_scale = np.float32(amax.max() / top)
    ratio = torch.from_numpy(amax / np.float32(fmt.max_value) / tensor_scale)
    block_scale = nearest(ratio, scale_fmt).numpy().astype(np.float32)
    scale = np.maximum(block_scale, np.float32(magnitudes(scale_fmt)[1])) * tensor_scale
    elements = nearest(torch.from_numpy(wide / scale), fmt).numpy().astype(np.float32)
    return torch.from_numpy(elements * scale)


def words(codes: torch.Tensor, bits: int, size: int) -> list[bytes]:
    """Return rows of codes as bytes without gaps, the first code in the lowest bits.

    Args:
        codes: (rows, n) unsigned codes.
        bits: Width of a code.
        size: Bytes of a row.
    """
    return [
        sum(code << (bits * place) for place, code in enumerate(row)).to_bytes(size, "little")
        for row in codes.tolist()
    ]


def _exponent(value: float) -> int:
    """Return floor(log2(value))."""
    return int(np.frexp(value)[1]) - 1
