"""Dynamic scales and float rounding in operators of ONNX, with the same bits as ``numerics``.

``numerics`` reads the exponent of a float from its bits, which no operator of ONNX can do. Here a
logarithm gives an exponent that is exact or one too small, and a comparison with the next power of
two corrects it. Elements are compared with the few powers of two of their format. The code uses
few operations, because a trace takes time for each.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from quark.torch.numerics.exponents import MAX_EXPONENT, MIN_EXPONENT, power_of_two
from quark.torch.numerics.formats import Format
from quark.torch.numerics.scale_formats import FLOAT32, ScaleFormat
from quark.torch.numerics.scales import qparams_from_range, tensor_scale_from_range
from quark.torch.numerics.scheme import Scheme

_OFFSET = 1 - MIN_EXPONENT
# A table for embedding, (powers, 1): POWERS[i] is 2^(i - _OFFSET).
POWERS = power_of_two(torch.arange(-_OFFSET, MAX_EXPONENT + 1, device="cpu")[:, None].int())
_NEAREST = 1 + 0x3504F4 / 2**23  # the smallest float32 above the square root of two
_NORMAL = torch.finfo(torch.float32).smallest_normal


def floor_power_of_two(x: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two that does not exceed each value, at least 2^-127.

    Example: 5.9 gives 4. The logarithm of 4 may be computed as 1.9999999, which is the exponent 1;
    so 4 >= 2 * 2^1 selects 4. The offset of 1e-3 keeps 7.9999995, whose logarithm may be computed
    as 3.0, from the exponent 3.

    Args:
        x: Non-negative float32 values.
        powers: ``POWERS``, on the device of ``x``.
    """
    x = x.clamp(2.0**MIN_EXPONENT, torch.finfo(torch.float32).max)
    guess = (x.log2() + (_OFFSET - 1e-3)).to(torch.int32)  # exact or one too small
    power = F.embedding(guess, powers).squeeze(-1)
    return torch.where(x >= power * 2, power * 2, power)


def round_to_float(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round float32 values to a float format, half to even, saturating.

    Example for fp4 (e2m1): the step between values is 0.5 below 2, 1 below 4, and 2 from 4 on. So
    5.2 / 2 = 2.6 rounds to 3, and 3 * 2 = 6.
    """
    x = x.clamp(-fmt.max_value if fmt.signed else 0.0, fmt.max_value)
    if fmt.native is not None:
        return x.to(fmt.native).float()
    magnitude = x.abs()
    step: torch.Tensor | float = _smallest_value(fmt)
    for exponent in range(fmt.min_exponent + 1, fmt.max_exponent + 1):
        wider = 2.0 ** (exponent - fmt.mantissa_bits)
        step = torch.where(magnitude >= 2.0**exponent, wider, step)
    return (x / step).round() * step


def activation_qparams(
    lo: torch.Tensor,
    hi: torch.Tensor,
    axis: int,
    scheme: Scheme,
    powers: torch.Tensor,
    tensor_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scale and zero point as ``numerics.scales.qparams_from_range`` does, in float32.

    Args:
        lo: Smallest values, float32.
        hi: Largest values, same shape.
        axis: Axis of the sub-blocks.
        scheme: Scheme of the activations. It is symmetric if scales are rounded.
        powers: ``POWERS``, on the device of the values.
        tensor_scale: Static tensor scale [] of two-level scales, or None to compute it.
    """
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    if scheme.shares_exponents:
        return _shared_exponent_steps(lo, hi, axis, scheme, powers), None
    plain = replace(scheme, scale=FLOAT32) if rounds_scales(scheme) else scheme
    scale, zeros = qparams_from_range(lo, hi, plain)
    if scheme.scale.two_level and tensor_scale is None:
        tensor_scale = tensor_scale_from_range(lo, hi, scheme)
    if rounds_scales(scheme):
        scale = _round_scale(scale, scheme.scale, powers, tensor_scale)
    if zeros is None or (scheme.symmetric and scheme.fmt.signed):
        return scale.float(), None
    return scale.float(), zeros.float()


def rounds_scales(scheme: Scheme) -> bool:
    """Whether scales are rounded to powers of two or to a narrow float format."""
    return scheme.scale.power_of_two or scheme.scale.fmt is not None


def _round_scale(
    scale: torch.Tensor, to: ScaleFormat, powers: torch.Tensor, tensor_scale: torch.Tensor | None
) -> torch.Tensor:
    """Round scales; see ``numerics.scales.round_scale``."""
    if to.fmt is None:
        power = floor_power_of_two(scale.clamp(min=_NORMAL), powers)
        return torch.where(scale / power >= _NEAREST, power * 2, power)
    unit = torch.ones_like(scale) if tensor_scale is None else tensor_scale
    return round_to_float(scale / unit, to.fmt).clamp(min=_smallest_value(to.fmt)) * unit


def _shared_exponent_steps(
    lo: torch.Tensor, hi: torch.Tensor, axis: int, scheme: Scheme, powers: torch.Tensor
) -> torch.Tensor:
    """Return the steps of blocks that share exponents; see ``numerics.exponents``."""
    fmt, amax = scheme.fmt, torch.maximum(-lo, hi)
    power = floor_power_of_two(amax, powers)
    if fmt.sub_block:
        return _sub_block_steps(power, fmt, axis)
    if fmt.block:
        step = power * 2.0 ** (2 - fmt.bits)
        overflows = ((hi / step).round() > fmt.qmax) | ((lo / step).round() < fmt.qmin)
        return torch.where(overflows, step * 2, step)
    up = amax > power
    if scheme.scale_mode == "even":
        mantissa = fmt.mantissa_bits if fmt.is_float else fmt.bits
        up = amax / power >= 2 - 2.0 ** (-mantissa - 1)
    below = 2.0**-fmt.fraction_bits
    step = power * (below * 2.0**-fmt.max_exponent)
    if scheme.scale_mode != "floor":
        step = torch.where(up, step * 2, step)
    return step.clamp(2.0**MIN_EXPONENT * below, 2.0**MAX_EXPONENT * below)


def _sub_block_steps(power: torch.Tensor, fmt: Format, axis: int) -> torch.Tensor:
    """Return the step of each sub-block (MX6, MX9): that of its block, or half of it.

    Args:
        power: Largest power of two up to the largest magnitude of each sub-block.
        fmt: Format of the elements.
        axis: Axis of the sub-blocks.
    """
    power = power.movedim(axis, -1)
    count, per_block = power.shape[-1], fmt.block // fmt.sub_block
    blocks = torch.unflatten(F.pad(power, (0, -count % per_block)), -1, (-1, per_block))
    top = blocks.amax(-1, keepdim=True)
    step = torch.where(blocks < top, top * 0.5, top) * 2.0 ** (2 - fmt.bits)
    return step.flatten(-2)[..., :count].movedim(-1, axis)


def _smallest_value(fmt: Format) -> float:
    """Return the smallest positive value of a float format."""
    return 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
