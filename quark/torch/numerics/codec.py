"""Codes of float formats without a torch type: sign, exponent, mantissa.

Example, fp4 (e2m1, exponent bias 1): 1.5 = 1.1b * 2^0 is the code 0 01 1 = 3, and -3 = -1.1b * 2^1
is 1 10 1 = 13. The subnormal 0.5 is 0 00 1 = 1.
"""

from __future__ import annotations

from functools import cache

import torch

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Format, TableFormat
from quark.torch.numerics.rounding import round_to_steps_, round_to_table

_MANTISSA = 7  # bits of mantissa of bfloat16


def encode(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of float32 values that lie on the grid of ``fmt``, as int32.

    A code is sign, exponent and mantissa from the highest bit down; unsigned formats have no sign.
    """
    if isinstance(fmt, TableFormat):
        return round_to_table(x, fmt, RoundType.half_even).to(torch.int32)
    bits = x.view(torch.int32)
    # For normal numbers, exponent and mantissa are adjacent bits in both formats: cut off the
    # mantissa bits that are not kept and subtract the difference of the biases.
    normal = (bits & 0x7FFFFFFF).bitwise_right_shift_(23 - fmt.mantissa_bits)
    normal.sub_(_offset(fmt) << fmt.mantissa_bits)
    small = x.abs().clamp_(max=2.0**fmt.min_exponent)  # larger values may overflow an integer
    small = small.mul_(2.0 ** (fmt.mantissa_bits - fmt.min_exponent)).to(torch.int32)
    codes = torch.maximum(small, normal, out=normal)  # ``normal`` is too small for subnormals
    return _with_sign(codes, bits, fmt)


def round_to_codes(x: torch.Tensor, fmt: Format, mode: RoundType) -> torch.Tensor:
    """Return the codes of rounded float32 values, as int32; ``x`` is overwritten.

    These are the bits of ``encode(round_to_grid_(x, fmt, mode), fmt)``, in fewer passes: a code
    counts the steps from zero. Example, fp4 (one mantissa bit): 2.9 has the exponent 1, so 2 codes
    lie below each exponent from 0 to 1, and it is 3 steps of 1: its code is 2 (1 - 0) + 3 = 5.
    """
    if isinstance(fmt, TableFormat):
        return round_to_table(x, fmt, mode).to(torch.int32)
    steps, step = round_to_steps_(x, fmt, mode)
    smallest = (127 + fmt.min_exponent - fmt.mantissa_bits) << 23  # bits of the smallest step
    codes = step.view(torch.int32).sub_(smallest).bitwise_right_shift_(23 - fmt.mantissa_bits)
    codes = _with_sign(codes, steps.view(torch.int32), fmt)  # its bit is clear in the sum
    return codes.add_(steps.abs_().to(torch.int32))


def round_bfloat16_to_codes(
    x: torch.Tensor, scale: torch.Tensor, fmt: Format, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the codes of bfloat16 values under scales that are powers of two, as int16.

    These are the codes of ``round_to_codes(x.float() / scale, fmt, RoundType.half_even)``, from the
    bits alone: bits of positive floats are in the order of the floats, and a division by a power of
    two subtracts from the exponent. Passes over int16 take half the time of those over float32.

    Example, fp4 under the scale 2: -5.5 has the bits 1 10000001 0110000, and the smallest normal
    number 1 * 2 has 0 10000000 0000000. The difference without the sign, 1 0110000, is 2^1 * 1.375,
    and rounds to 1 1 at one bit of mantissa: 2^1 * 1.5 = 3, with the sign code 1101.

    Args:
        x: Bits of finite or infinite values, int16, any shape.
        scale: float32, broadcasts over ``x``, within ``countable_scales(fmt)``.
        fmt: A signed float format with at most 8 bits.
        scratch: int16 (3, n) for at most n elements, overwritten: the result is a part of it. It
            saves new memory for each piece of a tensor. None for new memory.
    """
    scratch = x.new_empty(3, x.numel()) if scratch is None else scratch
    steps, codes, count = (part[: x.numel()].view(x.shape) for part in scratch.unbind())
    dropped = _MANTISSA - fmt.mantissa_bits  # bits, of which rounding leaves none
    # Steps are counted from where code 0 would lie, plus a half that rounds ties down.
    shift = (1 << dropped + fmt.mantissa_bits) + (1 << dropped - 1) - 1
    start = ((scale.view(torch.int32) >> 23) + fmt.min_exponent << _MANTISSA) - shift
    torch.bitwise_and(x, 0x7FFF, out=steps).sub_(start.to(torch.int16))
    steps.clamp_(max=_steps_above_normal(fmt.max_value, fmt) + shift)
    _count_subnormal_steps(steps, fmt, shift, codes, out=count)
    torch.bitwise_right_shift(steps, dropped, out=codes).bitwise_and_(1)  # of a tie, the even code
    codes.add_(steps).bitwise_right_shift_(dropped)
    torch.maximum(codes, count, out=codes)
    torch.bitwise_right_shift(x, 15, out=steps)  # all bits are the sign
    return codes.sub_(steps, alpha=1 << (fmt.bits - 1))


def countable_scales(fmt: Format) -> tuple[float, float]:
    """Return the least and the largest scale that ``round_bfloat16_to_codes`` takes.

    Under them no boundary between codes is a subnormal bfloat16, and infinity exceeds all codes.
    """
    least = 2.0 ** (fmt.mantissa_bits + 1 - fmt.min_exponent - 126)
    return least, 2.0 ** (127 - fmt.max_exponent)


def _count_subnormal_steps(
    steps: torch.Tensor, fmt: Format, shift: int, scratch: torch.Tensor, out: torch.Tensor
) -> None:
    """Write to ``out`` how many boundaries between subnormal codes lie below values, int16.

    Example, fp4 has the codes 0, 1, 2 for 0, 0.5, 1: the boundaries are 0.25, which rounds to the
    even code 0, and 0.75, which rounds to the even code 2.

    Args:
        steps: Bits of the values minus those of the smallest normal number, plus ``shift``.
        fmt: The format.
        shift: See ``steps``.
        scratch: int16 in the shape of ``steps``, overwritten.
        out: Likewise.
    """
    unit = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    # The most steps that do not count: a tie below an even code is the first that does.
    most = [
        _steps_above_normal((code + 0.5) * unit, fmt) - code % 2 + shift
        for code in range(1 << fmt.mantissa_bits)
    ]
    torch.clamp(steps, most[0], most[0] + 1, out=out)
    for last in most[1:]:
        out.add_(torch.clamp(steps, last, last + 1, out=scratch))
    out.sub_(sum(most))


@cache
def _steps_above_normal(value: float, fmt: Format) -> int:
    """Return the bits of a value of bfloat16 minus those of the smallest normal number."""
    bits = torch.tensor([value, 2.0**fmt.min_exponent], dtype=torch.bfloat16, device="cpu").view(
        torch.int16
    )
    return int(bits[0]) - int(bits[1])


def _with_sign(codes: torch.Tensor, bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Add the signs of float32 values, given their bits, to codes in place."""
    if fmt.signed:
        codes.bitwise_or_((bits >> (32 - fmt.bits)).bitwise_and_(1 << (fmt.bits - 1)))
    return codes


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the float32 values of codes, from a table of all codes: the inverse of ``encode``.

    Codes beyond the largest value, such as 255 of fp8_e5m3, are NaN.
    """
    table = _values(torch.arange(1 << fmt.bits, dtype=torch.int32, device=codes.device), fmt)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _values(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    if isinstance(fmt, TableFormat):
        return torch.tensor(fmt.values, dtype=torch.float32, device=codes.device)[codes]
    sign_bit = 1 << (fmt.bits - 1) if fmt.signed else 0
    magnitude = codes & ((1 << (fmt.bits - bool(sign_bit))) - 1)
    normal = (magnitude << (23 - fmt.mantissa_bits)) + (_offset(fmt) << 23)
    small = magnitude * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    values = torch.where(magnitude < 1 << fmt.mantissa_bits, small, normal.view(torch.float32))
    values = torch.where(values > fmt.max_value, torch.nan, values)
    return torch.where(codes & sign_bit != 0, -values, values) if sign_bit else values


def _offset(fmt: Format) -> int:
    """Return the exponent bias of float32 minus the exponent bias of ``fmt``."""
    return 126 + fmt.min_exponent
