"""Scales of two levels: integers times a float16 number that neighbouring blocks share.

Blocks that share the number are a super-block. Example: eight blocks with the scales 0.63, 0.5, …
and integers of 6 bits have the number 0.63 / 63 = 0.01, and the integers 63, 50, …. The product of
a float16 number and an integer of up to 8 bits is exact in float32, so the products alone are held
in memory, and ``factors`` finds their factors again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format
from quark.torch.numerics.scale_formats import ScaleFormat

_FLOAT16_BITS = 11  # of a significand
_SMALLEST = 2.0**-24  # float16


def round_to_super_blocks(
    x: torch.Tensor, to: ScaleFormat, axis: int, least: int = 1
) -> torch.Tensor:
    """Round numbers to integers times one float16 number for each super-block.

    Args:
        x: (…, blocks, …) float32, not negative.
        to: Format with a ``span``.
        axis: Axis of the blocks.
        least: Smallest integer.
    """
    assert to.fmt is not None
    ends = x.movedim(axis, -1)
    groups = _split(ends, to.span)  # (…, super-blocks, span)
    near = unit_of(groups, to.fmt)
    rounded = (groups / near).round_().clamp_(least, to.fmt.qmax).mul_(near)
    return rounded.flatten(-2)[..., : ends.shape[-1]].movedim(-1, axis)


def unit_of(groups: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the float16 number of each super-block, (…, super-blocks, 1) float32.

    Args:
        groups: (…, super-blocks, span) numbers, not negative.
        fmt: Format of the integers, the largest of which stands for the largest number.
    """
    amax, top = groups.amax(-1, keepdim=True), fmt.qmax
    unit = (amax / torch.full_like(amax, top)).clamp_(_SMALLEST, torch.finfo(torch.float16).max)
    near = unit.half()
    # Subnormal numbers of float16 are coarse: the nearest one may be too small for the largest
    # scale. Example: 1.4 * 2^-24 becomes 2^-24, so 63 steps reach 63 / 88 of it. 2^-23 takes its
    # place.
    is_small = (amax / near.float() > top + 0.5) & (near < torch.finfo(torch.float16).max)
    return (near.view(torch.int16) + is_small).to(torch.int16).view(torch.float16).float()


def factors(products: torch.Tensor, fmt: Format, span: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float16 numbers and the integers of products: see ``round_to_super_blocks``.

    Several pairs may have the same products; all of them have the same values.

    Args:
        products: (…, blocks) float32. They may be zero, and negative if the integers are signed.
        fmt: Format of the integers.
        span: Blocks of a super-block.

    Returns:
        (…, super-blocks) float16 and (…, super-blocks, span) int16.

    Raises:
        ValueError: The products of a super-block have no such factors.
    """
    groups = _split(products, span)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    unit, ratios = torch.zeros_like(extreme, dtype=torch.float16), torch.zeros_like(groups)
    open_ = extreme != 0
    # The extreme product is one of the integers times the number. Most often it is the largest.
    steps = sorted((n for n in range(fmt.qmin, fmt.qmax + 1) if n), key=lambda n: (-abs(n), -n))
    for step in steps:
        if not bool(open_.any()):
            break
        candidate = (extreme / step).half()
        number = torch.where(open_ & (candidate != 0), candidate.float(), 1)
        integers = (groups / number).round_().clamp_(fmt.qmin, fmt.qmax)
        is_exact = (integers * number == groups).all(-1, keepdim=True) & open_ & (candidate != 0)
        unit = torch.where(is_exact, candidate, unit)
        ratios = torch.where(is_exact, integers, ratios)
        open_ = open_ & ~is_exact
    if bool(open_.any()):
        raise ValueError(
            f"{int(open_.sum())} super-blocks of {span} scales are not {fmt.name} times a float16 "
            "number. Quantize the model again."
        )
    return unit.squeeze(-1), ratios.to(torch.int16)


def minima(scale: torch.Tensor, zero_point: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the products whose quotients by scales are zero points, float32.

    A zero point is the float32 quotient of a product of ``_FLOAT16_BITS + fmt.bits`` bits, so its
    product with the scale, rounded to as many bits, is exact.

    Args:
        scale: Scales.
        zero_point: Float32, in the same shape.
        fmt: Format of the integers.
    """
    fraction, exponent = torch.frexp(zero_point.double() * scale.double())
    bits = 2.0 ** (_FLOAT16_BITS + fmt.bits)
    return torch.ldexp((fraction * bits).round_() / bits, exponent).float()


def _split(x: torch.Tensor, span: int) -> torch.Tensor:
    """Return blocks (…, blocks) by super-block, (…, super-blocks, span); zeros fill the last."""
    return F.pad(x, (0, -x.shape[-1] % span)).reshape(*x.shape[:-1], -1, span)
