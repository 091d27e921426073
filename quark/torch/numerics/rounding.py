"""Rounding to integers and to floating-point grids."""

from __future__ import annotations

import torch

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.exponents import exponent_of, power_of_two
from quark.torch.numerics.formats import Format, TableFormat


def round_(x: torch.Tensor, mode: RoundType) -> torch.Tensor:
    """Round ``x`` to integers in place and return it."""
    if mode is RoundType.half_even:
        return x.round_()
    if mode is RoundType.floor:
        return x.floor_()
    # Not floor(|x| + 1/2): for 0.49999997, the float32 below 1/2, the sum rounds up to 1.
    whole = x.trunc()
    away = x.sub(whole).abs_().ge_(0.5).copysign_(x)
    return torch.add(whole, away, out=x)


def round_to_grid_(x: torch.Tensor, fmt: Format, mode: RoundType) -> torch.Tensor:
    """Round float32 ``x`` in place to the values of a float format, saturating at its largest.

    The step of the grid is two to the power of the exponent of x minus the mantissa width. The
    exponent is read from the bits, because a float32 logarithm is off by one just below a power of
    two. NaN stays NaN. Example, fp4 (one mantissa bit): 2.9 = 1.45 * 2^1 has the step 2^(1 - 1) = 1
    and rounds to 3; 0.3 is below the smallest normal number 2^0, has the step 2^-1 and rounds to
    0.5.
    """
    if isinstance(fmt, TableFormat):
        table = torch.tensor(fmt.values, dtype=x.dtype, device=x.device)
        nearest = table[round_to_table(x, fmt, mode)]
        return x.copy_(torch.where(x.isnan(), x, nearest))
    steps, step = round_to_steps_(x, fmt, mode)
    return steps.mul_(step)


def round_to_table(x: torch.Tensor, fmt: TableFormat, mode: RoundType) -> torch.Tensor:
    """Return the codes, int64, of values rounded to those of a table.

    Example, the table (-2, 0, 1, 4): 2.5 lies in the middle of 1 and 4, the codes 2 and 3, and
    rounds to the even code 2.
    """
    values = torch.tensor(fmt.values, dtype=x.dtype, device=x.device)
    if mode is RoundType.floor:
        return torch.bucketize(x, values, right=True).sub_(1).clamp_(0)
    middles = (values[1:] + values[:-1]) / 2
    low, high = (torch.bucketize(x, middles, right=right) for right in (False, True))
    takes_low = x < 0 if mode is RoundType.round else low % 2 == 0
    return torch.where(takes_low, low, high)  # they differ in the middle of two values alone


def steps_around(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return where the steps of a float format around each value begin, and their sizes.

    Example, fp4: 2.2 lies among the steps of 1 from 2 to 4, and 1.7 among those of 0.5 from 1 to 2.

    Returns:
        None for whole multiples of the size, which begin at zero; the value below ``x`` of a table,
        of whose two nearest values beyond its ends.
        The sizes, in the shape of ``x``.
    """
    if not isinstance(fmt, TableFormat):
        exponent = exponent_of(x).clamp(fmt.min_exponent, fmt.max_exponent)
        return None, power_of_two(exponent - fmt.mantissa_bits)
    values = torch.tensor(fmt.values, dtype=x.dtype, device=x.device)
    low = torch.bucketize(x, values, right=True).sub_(1).clamp_(0, len(values) - 2)
    return values[low], values.diff()[low]


def round_to_steps_(
    x: torch.Tensor, fmt: Format, mode: RoundType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 ``x`` in place to whole steps; return their numbers and the steps.

    See ``round_to_grid_``. Example, fp4: 2.9 is 3 steps of 1, and 0.3 is 1 step of 0.5.
    """
    x.clamp_(-fmt.max_value if fmt.signed else 0.0, fmt.max_value)
    exponent = x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)  # 2^e
    step = exponent.clamp_(min=2.0**fmt.min_exponent).mul_(2.0**-fmt.mantissa_bits)
    return round_(x.div_(step), mode), step
