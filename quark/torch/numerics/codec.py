"""Codes of float formats without a torch type: sign, exponent, mantissa.

Example, fp4 (e2m1, exponent bias 1): 1.5 = 1.1b * 2^0 is the code 0 01 1 = 3, and -3 = -1.1b * 2^1
is 1 10 1 = 13. The subnormal 0.5 is 0 00 1 = 1.
"""

from __future__ import annotations

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.rounding import RoundType, round_to_steps_


def encode(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the codes of float32 values that lie on the grid of ``fmt``, as int32.

    A code is sign, exponent and mantissa from the highest bit down; unsigned formats have no sign.
    """
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
    steps, step = round_to_steps_(x, fmt, mode)
    smallest = (127 + fmt.min_exponent - fmt.mantissa_bits) << 23  # bits of the smallest step
    codes = step.view(torch.int32).sub_(smallest).bitwise_right_shift_(23 - fmt.mantissa_bits)
    codes = _with_sign(codes, steps.view(torch.int32), fmt)  # its bit is clear in the sum
    return codes.add_(steps.abs_().to(torch.int32))


def _with_sign(codes: torch.Tensor, bits: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Add the signs of float32 values, given their bits, to codes in place."""
    if fmt.signed:
        codes.bitwise_or_((bits >> (32 - fmt.bits)).bitwise_and_(1 << (fmt.bits - 1)))
    return codes


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the float32 values of codes, from a table of all codes: the inverse of ``encode``."""
    table = _values(torch.arange(1 << fmt.bits, dtype=torch.int32, device=codes.device), fmt)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _values(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    sign_bit = 1 << (fmt.bits - 1) if fmt.signed else 0
    magnitude = codes & ((1 << (fmt.bits - bool(sign_bit))) - 1)
    normal = (magnitude << (23 - fmt.mantissa_bits)) + (_offset(fmt) << 23)
    small = magnitude * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    values = torch.where(magnitude < 1 << fmt.mantissa_bits, small, normal.view(torch.float32))
    return torch.where(codes & sign_bit != 0, -values, values) if sign_bit else values


def _offset(fmt: Format) -> int:
    """Return the exponent bias of float32 minus the exponent bias of ``fmt``."""
    return 126 + fmt.min_exponent
