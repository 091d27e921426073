"""Dynamic scales and float rounding in operators of ONNX, with the same bits as ``numerics``.

``numerics`` reads the exponent of a float from its bits, which no operator of ONNX can do. Here a
logarithm gives an exponent that is exact or one too small, and a comparison with the next power of
two corrects it. Elements are compared with the few powers of two of their format.

Functions take ``op``, an ``onnxscript.OpBuilder``, which adds nodes to a graph: ``op.Add(x, 1.0)``
adds a node and returns its output, an ``onnx_ir.Value``. Values are float32 here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quark.torch.numerics.exponents import MAX_EXPONENT, MIN_EXPONENT, power_of_two
from quark.torch.numerics.formats import Format
from quark.torch.numerics.scale_formats import ScaleFormat
from quark.torch.numerics.scales import EPS, largest_exponent, largest_scale, scale_limits
from quark.torch.numerics.scheme import Scheme

_OFFSET = 1 - MIN_EXPONENT
_LARGEST = torch.finfo(torch.float32).max
_NORMAL = torch.finfo(torch.float32).smallest_normal
_LOG_2 = 0.6931471805599453
_NEAREST = 1 + 0x3504F4 / 2**23  # the smallest float32 above the square root of two


@dataclass(frozen=True)
class BlockShape:
    """The shape of one value for each block.

    Attributes:
        axis: Axis along which blocks lie.
        count: Number of blocks along that axis.
    """

    axis: int
    count: int


def floor_power_of_two(op: Any, x: Any) -> Any:
    """Return the largest power of two that does not exceed each value, at least 2^-127.

    Example: 5.9 gives 4. The logarithm of 4 may be computed as 1.9999999, which is the exponent 1;
    so 4 >= 2 * 2^1 selects 4. The offset of 1e-3 keeps 7.9999995, whose logarithm may be computed
    as 3.0, from the exponent 3.

    Args:
        op: Builder of the graph.
        x: Non-negative values.
    """
    x = op.Clip(x, 2.0**MIN_EXPONENT, _LARGEST)
    guess = op.Add(op.Div(op.Log(x), _LOG_2), _OFFSET - 1e-3)  # exact or one too small
    # The table: 2^(i - _OFFSET) at i.
    exponents = torch.arange(-_OFFSET, MAX_EXPONENT + 1, dtype=torch.int32, device="cpu")
    power = op.Gather(power_of_two(exponents).tolist(), cast(op, guess, torch.int32))
    twice = op.Mul(power, 2.0)
    return op.Where(op.GreaterOrEqual(x, twice), twice, power)


def round_to_float(op: Any, x: Any, fmt: Format) -> Any:
    """Round values to a float format, half to even, saturating.

    Example for fp4 (e2m1): the step between values is 0.5 below 2, 1 below 4, and 2 from 4 on. So
    5.2 / 2 = 2.6 rounds to 3, and 3 * 2 = 6.
    """
    x = op.Clip(x, -fmt.max_value if fmt.signed else 0.0, fmt.max_value)
    if fmt.native is not None:
        return cast(op, cast(op, x, fmt.code_dtype), torch.float32)
    magnitude, step = op.Abs(x), _smallest_value(fmt)
    for exponent in range(fmt.min_exponent + 1, fmt.max_exponent + 1):
        wider = 2.0 ** (exponent - fmt.mantissa_bits)
        step = op.Where(op.GreaterOrEqual(magnitude, 2.0**exponent), wider, step)
    return op.Mul(op.Round(op.Div(x, step)), step)


def activation_qparams(
    op: Any,
    lo: Any,
    hi: Any,
    shape: BlockShape,
    scheme: Scheme,
    tensor_scale: Any,
    largest: float,
) -> tuple[Any, Any]:
    """Return scale and zero point as ``numerics.scales.qparams_from_range`` does, in float32.

    Args:
        op: Builder of the graph.
        lo: Smallest values.
        hi: Largest values, same shape.
        shape: Their shape.
        scheme: Scheme of the activations. It is symmetric if scales are rounded.
        tensor_scale: Static tensor scale [] of two-level scales, or None to compute it.
        largest: Largest magnitude that a code may stand for.

    Returns:
        The scale in the shape of ``lo``, and the zero point: values, a number, or None for zero.
    """
    fmt = scheme.fmt
    lo, hi = op.Min(lo, 0.0), op.Max(hi, 0.0)
    amax = op.Max(op.Neg(lo), hi)
    if scheme.shares_exponents:
        step = _shared_exponent_steps(op, lo, hi, amax, shape, scheme)
        return op.Min(step, 2.0 ** largest_exponent(fmt, largest)), None
    if scheme.scale.two_level and tensor_scale is None:
        tensor_scale = _tensor_scale(op, amax, scheme)
    if fmt.is_float:
        scale = op.Where(op.Equal(amax, 0.0), EPS, op.Div(amax, fmt.max_value))
        scale = _round_scale(op, scale, scheme.scale, tensor_scale)
        return op.Min(scale, largest_scale(scheme, largest)), None
    # hi - lo may overflow
    reach = amax if scheme.symmetric else op.Sub(op.Div(hi, 2.0), op.Div(lo, 2.0))
    scale = op.Max(op.Div(reach, (fmt.qmax - fmt.qmin) / 2), EPS)
    scale = _round_scale(op, scale, scheme.scale, tensor_scale)
    qmin, qmax = float(fmt.qmin), float(fmt.qmax)
    if scheme.symmetric:
        scale = op.Min(scale, largest_scale(scheme, largest))
        return scale, None if fmt.signed else float(fmt.middle)
    if scheme.float_zero_point:
        zero_point = op.Sub(qmin, op.Div(lo, scale))
    else:
        zero_point = op.Clip(op.Sub(qmin, op.Round(op.Div(lo, scale))), qmin, qmax)
    code = op.Max(op.Sub(qmax, zero_point), op.Sub(zero_point, qmin))
    smaller = op.Mul(op.Div(largest, code), 1 - 2**-8)
    return op.Where(op.Greater(op.Mul(scale, code), largest), smaller, scale), zero_point


def rounds_scales(scheme: Scheme) -> bool:
    """Whether scales are rounded to powers of two or to a narrow float format."""
    return scheme.scale.power_of_two or scheme.scale.fmt is not None


def cast(op: Any, x: Any, dtype: torch.dtype) -> Any:
    """Convert values to a type of torch."""
    from onnx_ir.tensor_adapters import from_torch_dtype

    return op.Cast(x, to=from_torch_dtype(dtype).value)


def split_axis(op: Any, x: Any, axis: int, sizes: tuple[int, int]) -> Any:
    """Return values whose axis of n is two axes: 10 x 64 x 3 -> 10 x 2 x 32 x 3 for (2, 32)."""
    before, after = op.Shape(x, end=axis), op.Shape(x, start=axis + 1)
    return op.Reshape(x, op.Concat(before, op.Constant(value_ints=sizes), after, axis=0))


def merge_axes(op: Any, x: Any, axis: int) -> Any:
    """Return values whose axes ``axis`` and ``axis + 1`` are one; undoes ``split_axis``."""
    before, after = op.Shape(x, end=axis), op.Shape(x, start=axis + 2)
    return op.Reshape(x, op.Concat(before, op.Constant(value_ints=[-1]), after, axis=0))


def pad_axis(op: Any, x: Any, axis: int, count: int) -> Any:
    """Return values with ``count`` zeros at the end of an axis."""
    return op.Pad(x, [0, count], 0.0, [axis]) if count else x


def _tensor_scale(op: Any, amax: Any, scheme: Scheme) -> Any:
    """Return the tensor scale []; see ``numerics.scales.tensor_scale_from_range``."""
    to, fmt = scheme.scale.fmt, scheme.fmt
    assert to is not None
    amax = op.Concat(op.Reshape(amax, [-1]), [0.0], axis=0)  # 0 of an empty tensor
    amax = op.ReduceMax(amax, keepdims=0)
    largest = fmt.max_value if fmt.is_float else fmt.qmax + 0.5
    scale = op.Max(op.Div(amax, largest * to.max_value), _NORMAL / _smallest_value(to))
    return op.Where(op.Equal(amax, 0.0), EPS, scale)


def _round_scale(op: Any, scale: Any, to: ScaleFormat, tensor_scale: Any) -> Any:
    """Round scales to their stored format; see ``numerics.scales.round_scale``."""
    if to.power_of_two:
        power = floor_power_of_two(op, op.Max(scale, _NORMAL))
        is_nearer = op.GreaterOrEqual(op.Div(scale, power), _NEAREST)
        return op.Where(is_nearer, op.Mul(power, 2.0), power)
    if to.fmt is not None:
        unit = 1.0 if tensor_scale is None else tensor_scale
        ratio = round_to_float(op, op.Div(scale, unit), to.fmt)
        return op.Mul(op.Max(ratio, _smallest_value(to.fmt)), unit)
    smallest, largest = scale_limits(to.stored_dtype)
    scale = op.Clip(scale, smallest, largest)
    stored = to.stored_dtype
    return scale if stored == torch.float32 else cast(op, cast(op, scale, stored), torch.float32)


def _shared_exponent_steps(
    op: Any, lo: Any, hi: Any, amax: Any, shape: BlockShape, scheme: Scheme
) -> Any:
    """Return the steps of blocks that share exponents; see ``numerics.exponents``."""
    fmt = scheme.fmt
    power = floor_power_of_two(op, amax)
    if fmt.sub_block:
        return _sub_block_steps(op, power, shape, fmt)
    if fmt.block:
        step = op.Mul(power, 2.0 ** (2 - fmt.bits))
        above = op.Greater(op.Round(op.Div(hi, step)), float(fmt.qmax))
        below = op.Less(op.Round(op.Div(lo, step)), float(fmt.qmin))
        return op.Where(op.Or(above, below), op.Mul(step, 2.0), step)
    fraction = 2.0**-fmt.fraction_bits
    step = op.Mul(power, fraction * 2.0**-fmt.max_exponent)
    if scheme.scale_mode == "even":
        mantissa = fmt.mantissa_bits if fmt.is_float else fmt.bits
        up = op.GreaterOrEqual(op.Div(amax, power), 2 - 2.0 ** (-mantissa - 1))
        step = op.Where(up, op.Mul(step, 2.0), step)
    elif scheme.scale_mode == "ceil":
        step = op.Where(op.Greater(amax, power), op.Mul(step, 2.0), step)
    return op.Clip(step, 2.0**MIN_EXPONENT * fraction, 2.0**MAX_EXPONENT * fraction)


def _sub_block_steps(op: Any, power: Any, shape: BlockShape, fmt: Format) -> Any:
    """Return the step of each sub-block (MX6, MX9): that of its block, or half of it.

    Args:
        op: Builder of the graph.
        power: Largest power of two up to the largest magnitude of each sub-block.
        shape: Shape of ``power``.
        fmt: Format of the elements.
    """
    axis, count = shape.axis, shape.count
    per_block = fmt.block // fmt.sub_block
    blocks = -(-count // per_block)
    power = pad_axis(op, power, axis, blocks * per_block - count)
    power = split_axis(op, power, axis, (blocks, per_block))
    top = op.ReduceMax(power, [axis + 1])
    step = op.Where(op.Less(power, top), op.Mul(top, 0.5), top)
    step = merge_axes(op, op.Mul(step, 2.0 ** (2 - fmt.bits)), axis)
    return op.Slice(step, [0], [count], [axis]) if count % per_block else step


def _smallest_value(fmt: Format) -> float:
    """Return the smallest positive value of a float format."""
    return 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
