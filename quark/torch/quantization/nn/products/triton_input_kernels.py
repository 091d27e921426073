"""A Triton kernel that quantizes inputs, and dequantizes them, in one launch.

Each operation is the one of ``numerics`` (``scales``, ``exponents``, ``rounding``, ``qdq``), in
float32 and in the same order, so results have the same bits. Kernels are launched without the
contraction of products and sums into one operation, which would round once in place of twice.
``CASE`` is a ``triton_inputs.Case``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.torch.quantization.nn.products.triton_functions import triton_function

if TYPE_CHECKING:
    import triton.language as tl


@triton_function
def bits_of(x):
    """Return the bits of float32 numbers, int32."""
    return x.to(tl.int32, bitcast=True)


@triton_function
def float_of(bits):
    """Return the float32 numbers of bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton_function
def clamp(x, low, high):
    """Return x within bounds; NaN stays NaN."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton_function
def round_whole(x, MODE: tl.constexpr):
    """Round to integers as ``rounding.round_`` does, with the sign of zeros."""
    if MODE == "floor":
        rounded = tl.floor(x)
    else:
        size = tl.abs(x)
        below = tl.floor(size)
        rest = size - below
        if MODE == "round":
            goes_up = rest >= 0.5
        else:
            is_odd = below - 2.0 * tl.floor(below * 0.5) > 0.0
            goes_up = (rest > 0.5) | ((rest == 0.5) & is_odd)
        size = tl.where(goes_up, below + 1.0, below)
        rounded = float_of(bits_of(size) | (bits_of(x) & -0x80000000))
    return rounded


@triton_function
def round_float(x, FLOAT: tl.constexpr, MODE: tl.constexpr):
    """Round to the values of a float format as ``rounding.round_to_grid_`` does."""
    x = clamp(x, FLOAT.lowest, FLOAT.largest)
    exponent = clamp(float_of(bits_of(x) & 0x7F800000), FLOAT.smallest_normal, float("inf"))
    step = exponent * FLOAT.step_of_one
    return round_whole(tl.div_rn(x, step), MODE) * step


@triton_function
def power_of_two(exponent):
    """Return 2^exponent for exponents from -149 to 127, as ``exponents.power_of_two`` does."""
    # Below 2^-126 a float32 has no exponent: its bits are 1 << (exponent + 149).
    normal = (tl.maximum(exponent, -126) + 127) << 23
    small = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 22)
    return float_of(tl.where(exponent < -126, small, normal))


@triton_function
def stored_scale(scale, tensor_scale, CASE: tl.constexpr):
    """Return scales in their stored format, as ``scales.round_scale`` does."""
    if CASE.scale == "power":
        bits = bits_of(clamp(scale, CASE.smallest_scale, float("inf")))
        scale = power_of_two((((bits + 0x4AFB0C) >> 23) & 0xFF) - 127)
    elif CASE.scale == "float":
        unit = tl.full(scale.shape, 1.0, tl.float32)
        if tensor_scale is not None:
            unit *= tl.load(tensor_scale)
        ratio = round_float(tl.div_rn(scale, unit), CASE.scale_float, "half_even")
        scale = clamp(ratio, CASE.smallest_scale, float("inf")) * unit
    else:
        scale = clamp(scale, CASE.smallest_scale, CASE.largest_float32)
    return scale


@triton_function
def symmetric_scale(largest, tensor_scale, CASE: tl.constexpr):
    """Return the scale of a block with this largest magnitude, as ``scales`` computes it.

    Args:
        largest: Bits of the largest magnitude, int32, those of NaN above all others.
        tensor_scale: Tensor scale [] of two-level scales, or None.
        CASE: A ``triton_inputs.Case``.
    """
    if CASE.scale == "shared":
        bits = tl.minimum(largest, 0x7F800000)
        if CASE.scale_mode == "even":
            bits += CASE.half_unit
        exponent = ((bits >> 23) & 0xFF) - 127 - CASE.element_exponent
        if CASE.scale_mode == "ceil":
            exponent += ((bits & 0x7FFFFF) != 0).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -127), 127) - CASE.fraction_bits
        scale = power_of_two(tl.minimum(exponent, CASE.largest_exponent))
    else:
        amax = float_of(largest)
        scale = tl.div_rn(amax, tl.full(amax.shape, CASE.reach, tl.float32))
        if CASE.is_float:
            scale = tl.where(amax == 0.0, CASE.epsilon, scale)
        else:
            scale = clamp(scale, CASE.epsilon, float("inf"))
        scale = clamp(stored_scale(scale, tensor_scale, CASE), float("-inf"), CASE.largest_scale)
    return scale


@triton_function
def asymmetric_scale(below, above, CASE: tl.constexpr):
    """Return scale and zero point of a block in [-below, above], as ``scales`` computes them.

    Args:
        below: Bits of the largest magnitude of negative numbers, int32.
        above: Likewise of positive numbers.
        CASE: A ``triton_inputs.Case``.
    """
    low, high = float_of(below), float_of(above)
    reach = high * 0.5 + low * 0.5
    scale = tl.div_rn(reach, tl.full(reach.shape, CASE.reach, tl.float32))
    scale = stored_scale(clamp(scale, CASE.epsilon, float("inf")), None, CASE)
    steps = tl.div_rn(-low, scale)
    if CASE.adds_first:
        zero = CASE.qmin - steps
    else:
        zero = clamp(CASE.qmin - round_whole(steps, "half_even"), CASE.qmin, CASE.qmax)
    # float64, since the comparison is with the largest value of the type.
    wide = zero.to(tl.float64)
    code = tl.maximum(CASE.qmax - wide, wide - CASE.qmin)
    largest = tl.full(code.shape, CASE.largest, tl.float64)
    smaller = (largest / code * (1.0 - 2.0**-8)).to(tl.float32)
    return tl.where(scale.to(tl.float64) * code > CASE.largest, smaller, scale), zero


@triton_function
def round_to_codes(x, scale, zero, CASE: tl.constexpr):
    """Return codes less the zero point, float32: what ``qdq.round_trip`` multiplies by scales."""
    x = tl.div_rn(x, scale) if CASE.divides else x * tl.div_rn(1.0, scale)
    if CASE.is_float:
        codes = round_float(x, CASE.element, CASE.mode)
    elif zero is None:
        codes = clamp(round_whole(x, CASE.mode) + 0.0, CASE.qmin, CASE.qmax)
    else:
        if CASE.adds_first:
            codes = round_whole(x + zero, CASE.mode)
        else:
            codes = round_whole(x, CASE.mode) + zero
        codes = clamp(codes, CASE.qmin, CASE.qmax) - zero
    return codes


@triton_function
def extremes(x, row, rows, steps, columns, BLOCK_K: tl.constexpr):
    """Return bits of the largest magnitudes of negative and of positive numbers, of each row."""
    below = tl.zeros(row.shape, dtype=tl.int32)
    above = tl.zeros(row.shape, dtype=tl.int32)
    for step in range(steps):
        column = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        mask = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=mask, other=0).to(tl.float32)
        sizes = bits_of(values) & 0x7FFFFFFF  # NaN has larger bits than numbers
        is_negative = (values < 0.0) | (values != values)
        is_positive = (values > 0.0) | (values != values)
        below = tl.maximum(below, tl.max(tl.where(is_negative, sizes, 0), 1)[:, None])
        above = tl.maximum(above, tl.max(tl.where(is_positive, sizes, 0), 1)[:, None])
    return below, above


@triton_function
def quantize(
    x,
    y,
    scales,
    rows,
    steps,
    columns,
    scale,
    zero,
    tensor_scale,
    CASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantize x (rows, columns), with the given scale [] or one for each row.

    Without ``scales``, y gets the dequantized values; else y gets the codes, and ``scales`` (rows,)
    the scales that are not given.

    The grid is (tiles of rows, 1), or with a given scale (tiles of rows, parts of ``steps`` tiles
    of columns).
    """
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    first = tl.program_id(1) * steps
    if scale is None:
        below, above = extremes(x, row, rows, steps, columns, BLOCK_K)
        if CASE.is_symmetric:
            factor = symmetric_scale(tl.maximum(below, above), tensor_scale, CASE)
            point = None
        else:
            factor, point = asymmetric_scale(below, above, CASE)
    else:
        factor = tl.load(scale)
        point = None if zero is None else tl.load(zero).to(tl.float32)
    for step in range(first, first + steps):
        column = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        mask = (row < rows) & (column < columns)
        values = tl.load(x + row * columns + column, mask=mask, other=0).to(tl.float32)
        values = round_to_codes(values, factor, point, CASE)
        if scales is None:
            values *= factor
            if CASE.saturates:
                values = clamp(values, -65504.0, 65504.0)
        tl.store(y + row * columns + column, values.to(y.dtype.element_ty), mask=mask)
    if scales is not None and scale is None:
        tl.store(scales + row, factor, mask=row < rows)
