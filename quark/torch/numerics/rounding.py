"""Rounding to integers and to floating-point grids."""

from __future__ import annotations

from enum import Enum

import torch

from quark.torch.numerics.formats import Format


class RoundType(Enum):
    """How a value between two codes is decided.

    ``half_even`` rounds to the nearest, ties to the even code; ``round`` rounds to the nearest,
    ties away from zero; ``floor`` rounds towards minus infinity.
    """

    round = 2
    floor = 3
    half_even = 8


def round_(x: torch.Tensor, mode: RoundType) -> torch.Tensor:
    """Round ``x`` to integers in place and return it."""
    if mode is RoundType.half_even:
        return x.round_()
    if mode is RoundType.floor:
        return x.floor_()
    # floor(|x| + 1/2) is off for |x| just below 1/2, where the sum itself rounds up to 1.
    whole = x.trunc()
    away = x.sub(whole).abs_().ge_(0.5).copysign_(x)
    return torch.add(whole, away, out=x)


def round_to_grid_(x: torch.Tensor, fmt: Format, mode: RoundType) -> torch.Tensor:
    """Round float32 ``x`` in place to the values of a float format, saturating at its largest.

    The step of the grid is two to the exponent of x less the mantissa width. The exponent is read
    from the bits: a float32 logarithm is off by one just below a power of two. NaN stays NaN.
    """
    x.clamp_(-fmt.max_value if fmt.signed else 0.0, fmt.max_value)
    exponent = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)  # 2^e
    step = exponent.clamp_(min=2.0**fmt.min_exponent).mul_(2.0**-fmt.mantissa_bits)
    return round_(x.div_(step), mode).mul_(step)
