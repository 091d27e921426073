"""Scale and zero point from the range of values."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.exponents import (
    block_exponent,
    micro_exponents,
    power_of_two,
    shared_exponent,
)
from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.ranges import find_extremes
from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.numerics.scale_formats import ScaleFormat
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.super_blocks import round_to_super_blocks

# Smallest scale of an integer format, 2^-23. float16 can represent it, and checkpoints of the
# documented format have it for all-zero tensors.
EPS = torch.finfo(torch.float32).eps
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
_PIECE = 1 << 17  # elements of a weight that are reduced at once
_SHORT = 32  # elements of a row that fill no vector registers of a CPU
_EXACT_BITS = 24  # of integers that float32 holds


def block_range(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each block in float32.

    Both have ``scheme.scale_shape(x.shape)``. NaN propagates.
    """
    blocks = scheme.blocks(x.shape)
    shape = scheme.scale_shape(x.shape)
    view = blocks.split(x)
    lo, hi = _extremes(view, blocks.reduced)
    return lo.float().reshape(shape), hi.float().reshape(shape)


def _extremes(view: torch.Tensor, reduced: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    by_kernel = find_extremes(view, reduced)
    if by_kernel is not None:
        return by_kernel
    is_by_row = view.dim() > 1 and reduced == (view.dim() - 1,) and view.numel() > 0
    if view.device.type != "cpu" and len(reduced) == 1 and view.numel() > 0:
        lowest, highest = view.aminmax(dim=reduced[0])  # in one launch
        return lowest, highest
    if not is_by_row or view.device.type != "cpu":
        return view.amin(reduced), view.amax(reduced)
    # CPUs reduce rows of float32 fastest, in pieces that stay in the cache. Short rows become the
    # columns of a matrix. Example, groups of 16: 16 vectors of 8192 values give 8192 extremes.
    is_short = view.shape[-1] < _SHORT
    ends = []
    pieces = torch.split(view, max(1, _PIECE * len(view) // view.numel()))
    is_wide = view.dtype == torch.float32 and not is_short
    buffer = torch.empty(0 if is_wide else pieces[0].numel(), dtype=torch.float32, device="cpu")
    for piece in pieces:
        wide = piece.movedim(-1, 0) if is_short else piece
        if not is_wide:  # one buffer for all pieces: new memory would take time for each
            wide = buffer[: piece.numel()].view(wide.shape).copy_(wide)
        axis = 0 if is_short else -1
        ends.append((wide.amin(axis), wide.amax(axis)))
    lo, hi = zip(*ends, strict=True)
    return torch.cat(lo), torch.cat(hi)


def largest_value(dtype: torch.dtype) -> float:
    """Return the largest value that quantized values of a type may have.

    It is that of bfloat16 for float32 too, since checkpoints of float32 models are often loaded in
    bfloat16.
    """
    return min(torch.finfo(dtype).max, BFLOAT16_MAX)


def qparams_from_range(
    lo: torch.Tensor,
    hi: torch.Tensor,
    scheme: Scheme,
    tensor_scale: torch.Tensor | None = None,
    largest: float = BFLOAT16_MAX,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute scale and zero point for values in [lo, hi], widened to include zero.

    Symmetric integers: amax / ((qmax - qmin) / 2), zero point in the middle of the codes; with
    ``scheme.signed_scales`` the value farthest from zero / the distance of qmin from the middle.
    Asymmetric: (hi - lo) / (qmax - qmin), zero point qmin - lo / scale, rounded unless
    ``scheme.float_zero_point``. Floats: amax / largest value, no zero point. Formats with shared
    exponents: see ``exponents``.

    Example, values in [-1, 3] and codes of 4 bits: symmetric int4 has the scale 3 / 7.5 = 0.4 and
    the zero point 0; asymmetric uint4 has the scale 4 / 15 and the zero point 0 + 1 / (4 / 15),
    rounded to 4. Symmetric int4 with signed scales has the scale 3 / -8 = -0.375: the code -8 is 3.

    Args:
        lo: Smallest values, float32.
        hi: Largest values, same shape.
        scheme: How the tensor is quantized.
        tensor_scale: Tensor scale [] of two-level scales; computed from the given ranges by
            default.
        largest: Largest magnitude that a code may stand for; see ``largest_value``. Scales are
            smaller where a code would exceed it, so the largest values saturate.

    Returns:
        The scale in ``scheme.scale.held_dtype`` and the zero point (int32, float32, or None), in
        the shape of ``lo``.
    """
    fmt = scheme.fmt
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    if scheme.shares_exponents:
        exponents = _exponents(lo, hi, scheme)
        return power_of_two(exponents.clamp(max=largest_exponent(fmt, largest))), None
    if scheme.scale.two_level and tensor_scale is None:
        tensor_scale = tensor_scale_from_range(lo, hi, scheme)
    if fmt.is_float:
        is_zero = torch.maximum(-lo, hi) == 0
        scale = torch.where(is_zero, EPS, _float_scale(lo, hi, fmt))
        scale = round_scale(scale, scheme.scale, tensor_scale, scheme.axis)
        return scale.clamp(max=largest_scale(scheme, largest)), None
    if scheme.symmetric:
        scale = _symmetric_scale(lo, hi, scheme, tensor_scale)
        scale = scale.clamp(-largest_scale(scheme, largest), largest_scale(scheme, largest))
        return scale, torch.full_like(scale, fmt.middle, dtype=torch.int32)
    if scheme.scale.span:
        lo = -round_to_super_blocks(-lo, scheme.scale, scheme.axis, least=0)
    # Of values on both sides, hi - lo may overflow.
    scale = _divided(torch.add(hi / 2, lo, alpha=-0.5), (fmt.qmax - fmt.qmin) / 2)
    scale = round_scale(scale, scheme.scale, tensor_scale, scheme.axis, EPS)
    zero_point, code = _zero_point(lo, scale.float(), scheme)
    # A rounded zero point moves the range by up to half a step beyond the values. Example: codes
    # 0 to 15 for values from -1 to 1 have the zero point 8 and begin at -8 / 7.5.
    most = torch.full_like(code, largest) / code  # a GPU multiplies a scalar by reciprocals
    smaller = scale / 2 if scheme.scale.power_of_two else (most * (1 - 2**-8)).to(scale.dtype)
    return torch.where(scale > most, smaller, scale), zero_point


def _symmetric_scale(
    lo: torch.Tensor, hi: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None
) -> torch.Tensor:
    """Return the scale of symmetric integers, rounded to its format."""
    fmt = scheme.fmt
    steps = fmt.middle - fmt.qmin if scheme.signed_scales else (fmt.qmax - fmt.qmin) / 2
    scale = _divided(torch.maximum(-lo, hi), steps)
    scale = round_scale(scale, scheme.scale, tensor_scale, scheme.axis, EPS)
    return torch.where(hi > -lo, -scale, scale) if scheme.signed_scales else scale


def _float_scale(lo: torch.Tensor, hi: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the scale under which no value exceeds those of a format without zero points."""
    least, most = fmt.reach()
    if _is_lopsided(fmt):
        return torch.maximum(_divided(lo, least), _divided(hi, most))
    return _divided(torch.maximum(-lo, hi), most)


def _is_lopsided(fmt: Format) -> bool:
    """Whether a format without zero points reaches farther on one side of zero, as a table may."""
    least, most = fmt.reach()
    return fmt.is_float and least < 0 and -least != most


def _zero_point(
    lo: torch.Tensor, scale: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the code of zero, for codes that begin at ``lo``, and the largest code less it."""
    fmt = scheme.fmt
    begin = lo / scale
    if scheme.float_zero_point:
        zero_point = fmt.qmin - begin
        return zero_point, torch.maximum(fmt.qmax - zero_point, -begin)
    below = begin.round()
    if fmt.bits > _EXACT_BITS:
        below = below.double()
    below = below.neg().clamp(0, fmt.qmax - fmt.qmin)  # codes below that of zero
    code = torch.maximum(fmt.qmax - fmt.qmin - below, below)
    return (below + fmt.qmin if fmt.qmin else below).to(torch.int32), code


def largest_exponent(fmt: Format, largest: float) -> int:
    """Return the largest exponent of a step of a format under which no code exceeds ``largest``."""
    # Example: bfloat16 reaches 1.99 * 2^127. fp4 has codes up to 1.5 * 2^2, so 2^125 is the largest
    # scale; integers have codes down to -2^7, so 2^120 is the largest step.
    code = fmt.max_value if fmt.is_float else max(-fmt.qmin, fmt.qmax)
    return math.frexp(largest / code)[1] - 1


def largest_scale(scheme: Scheme, largest: float) -> float:
    """Return the largest scale of a scheme without zero points; see ``largest_exponent``.

    It is rounded down to the stored type. Scales of two levels have no limit but that of their
    type: the tensor scale is their limit.
    """
    to, fmt = scheme.scale, scheme.fmt
    if to.two_level:
        return torch.finfo(to.held_dtype).max
    middle = 0 if fmt.is_float else fmt.middle
    code = fmt.max_value if fmt.is_float else max(middle - fmt.qmin, fmt.qmax - middle)
    fraction, exponent = math.frexp(largest / code)  # 0.5 <= fraction < 1
    mantissa_bits = 0 if to.power_of_two else 7 if to.fmt is None else to.fmt.mantissa_bits
    steps = 2 << mantissa_bits
    most = math.ldexp(math.floor(fraction * steps) / steps, exponent)
    return min(most, torch.finfo(to.held_dtype).max)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """Divide by a number. A GPU multiplies by the reciprocal of a scalar, which rounds twice."""
    return x / torch.full_like(x, by)


def tensor_scale_from_range(lo: torch.Tensor, hi: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the float32 tensor scale [] of two-level scales.

    It maps the largest block scale to the largest value of the scale format. It is larger if the
    smallest block scale would be a subnormal number, which has no finite reciprocal. Example,
    NVFP4 with an amax of 12: block scales are up to 12 / 6 = 2, and e4m3 reaches 448, so the tensor
    scale is 12 / (6 * 448) and the largest stored block scale is 448.
    """
    to = scheme.scale.fmt
    assert to is not None
    amax = F.pad(torch.maximum(-lo, hi).flatten(), (0, 1)).amax()  # 0 of an empty tensor
    largest = scheme.fmt.max_value if scheme.fmt.is_float else scheme.fmt.qmax + 0.5
    scale = _divided(amax, largest * to.max_value)
    least = torch.finfo(torch.float32).smallest_normal / to.smallest
    return torch.where(amax == 0, EPS, scale.clamp(min=least))


def represented_range(
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    of_tensor_scale: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a range [lo, hi] that has a given scale, float32: undo ``qparams_from_range``.

    Args:
        scale: Scale, or the tensor scale of two-level scales.
        zero_point: Zero point, or None.
        scheme: How the tensor is quantized.
        of_tensor_scale: Whether ``scale`` is a tensor scale.
    """
    assert scale is not None
    fmt, scale = scheme.fmt, scale.float()
    if scheme.signed_scales:
        ends = (fmt.qmin - fmt.middle) * scale, (fmt.qmax - fmt.middle) * scale
        return torch.minimum(*ends), torch.maximum(*ends)
    if _is_lopsided(fmt):
        least, most = fmt.reach()
        return least * scale, most * scale
    if scheme.symmetric or fmt.is_float or zero_point is None:
        reach = scale * (fmt.max_value if fmt.is_float else (fmt.qmax - fmt.qmin) / 2)
        if of_tensor_scale and scheme.scale.fmt is not None:
            reach = reach * scheme.scale.fmt.max_value
        return -reach, reach
    zeros = zero_point.float()
    return (fmt.qmin - zeros) * scale, (fmt.qmax - zeros) * scale


def round_scale(
    scale: torch.Tensor,
    to: ScaleFormat,
    tensor_scale: torch.Tensor | None = None,
    axis: int = -1,
    least: float = 0.0,
    signs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Round float32 scales to their stored format. No scale becomes zero or infinite.

    No scale has another sign than the given one: it becomes the smallest of that sign.

    Args:
        scale: The scales.
        to: Their format.
        tensor_scale: Tensor scale [] of two-level scales, or None.
        axis: Axis of the blocks, for scales in super-blocks.
        least: Smaller scales are rounded as this one.
        signs: Scales with the signs of the result; None if all are positive.
    """
    if signs is not None:
        sign = torch.where(signs < 0, -1, 1)
        rounded = round_scale(scale * sign, to, tensor_scale, axis, least)
        return rounded * sign.to(rounded.dtype)
    if least and (to.span or to.power_of_two or to.fmt is not None):
        scale = scale.clamp(min=least)
    if to.span:
        return round_to_super_blocks(scale, to, axis)
    if to.power_of_two:
        # The nearest exponent: up from the square root of two, whose mantissa is 0x3504F3. Adding
        # 0x7FFFFF - 0x3504F3 carries into the exponent exactly for larger mantissas.
        bits = scale.clamp(min=torch.finfo(torch.float32).smallest_normal).view(torch.int32)
        return power_of_two((bits + (0x7FFFFF - 0x3504F3) >> 23 & 0xFF) - 127)
    if to.fmt is not None:
        unit = torch.ones_like(scale) if tensor_scale is None else tensor_scale
        ratio = round_to_grid_(scale / unit, to.fmt, RoundType.half_even)
        return ratio.clamp_(min=to.fmt.smallest) * unit
    smallest, largest = scale_limits(to.stored_dtype)
    return scale.clamp(max(smallest, least), largest).to(to.stored_dtype)


def round_zero_point(zero_point: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return float zero points whose minima are stored in super-blocks; others do not change.

    Args:
        zero_point: Float zero points.
        scale: Scales as they are stored.
        scheme: How the tensor is quantized.
    """
    if not scheme.scale.span:
        return zero_point
    minimum = ((zero_point - scheme.fmt.qmin) * scale).clamp(min=0)
    minimum = round_to_super_blocks(minimum, scheme.scale, scheme.axis, least=0)
    return scheme.fmt.qmin + minimum / scale


def round_qparams(
    scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return any scales and float zero points in super-blocks; others do not change."""
    if not scheme.scale.span:
        return scale, zero_point
    rounded = round_scale(scale, scheme.scale, None, scheme.axis, signs=scale)
    if zero_point is None or scheme.symmetric:
        return rounded, zero_point
    moved = scheme.fmt.qmin + (zero_point - scheme.fmt.qmin) * scale / rounded  # the same minimum
    return rounded, round_zero_point(moved, rounded, scheme)


def scale_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest scale of a float type."""
    limits = torch.finfo(dtype)
    # A scale needs a finite reciprocal, which subnormals lack except in float16.
    smallest = limits.smallest_normal if limits.bits > 16 or limits.max > 1e5 else EPS
    return smallest, limits.max


def _exponents(lo: torch.Tensor, hi: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the exponent of the step of each block, or sub-block, within [lo, hi]."""
    fmt = scheme.fmt
    amax = torch.maximum(-lo, hi)
    if fmt.sub_block:
        return micro_exponents(amax, fmt, scheme.axis)
    if fmt.block:
        return block_exponent(lo, hi, fmt)
    return shared_exponent(amax, fmt, scheme.scale_mode) - fmt.fraction_bits
