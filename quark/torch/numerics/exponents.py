"""Scales that are powers of two: exponents that the elements of a block share.

Exponents are read from the bits of float32, because a float32 logarithm is off by one just below a
power of two. Values below the smallest normal number count as zero. Example::

    6.0 = 1.5 * 2^2 = 0x40C00000: sign 0, exponent 0x81 = 129, mantissa 0x400000
    exponent of 6.0 = 129 - 127 = 2
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format

MIN_EXPONENT = -127
MAX_EXPONENT = 127


def exponent_of(x: torch.Tensor) -> torch.Tensor:
    """Return floor(log2(|x|)) as int32, -127 for zero."""
    return (x.view(torch.int32) >> 23 & 0xFF) - 127


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float32, exactly, for exponents from -149 to 127."""
    # Below 2^-126 the exponent bits end, so half of the exponent at a time: 2^-130 = 2^-65 * 2^-65.
    half = exponent >> 1
    return _normal_power(half) * _normal_power(exponent - half)


def _normal_power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent in float32 from its bits, for exponents of normal numbers."""
    return (exponent.to(torch.int32) + 127 << 23).view(torch.float32)


def shared_exponent(amax: torch.Tensor, fmt: Format, mode: str) -> torch.Tensor:
    """Return the exponent of the scale of blocks whose largest magnitude is ``amax``.

    ``floor`` is the conversion of the OCP Microscaling specification 1.0, section 6.3:
    floor(log2(amax)) minus the largest exponent of the elements. ``ceil`` rounds the logarithm up.
    ``even`` first rounds amax, half up, to the mantissa width of the elements: a block whose
    largest value would round beyond the range gets the next larger scale.

    Example, fp4 with values up to 6 = 1.5 * 2^2 (largest exponent 2)::

        amax   floor  even  ceil
        6.9    0      0     1
        7.0    0      1     1      7 rounds to 8, beyond 6 * 2^0
        8.0    1      1     1

    Args:
        amax: Largest magnitudes, float32.
        fmt: Format of the elements.
        mode: ``even``, ``floor`` or ``ceil``.

    Returns:
        int32 exponents from -127 to 127.
    """
    # NaN counts as infinity: reductions give it any bits, to which a half would not add.
    bits = (amax.view(torch.int32) & 0x7FFFFFFF).clamp(max=0x7F800000)
    if mode == "even":
        mantissa = fmt.mantissa_bits if fmt.is_float else fmt.bits
        # Half a unit of the last mantissa bit that elements keep; a carry raises the exponent.
        bits = bits + (1 << (22 - mantissa))
    exponent = (bits >> 23 & 0xFF) - 127 - fmt.max_exponent
    if mode == "ceil":
        exponent += (bits & 0x7FFFFF) != 0
    return exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)


def micro_exponents(amax: torch.Tensor, fmt: Format, axis: int) -> torch.Tensor:
    """Return the exponent of the step of each sub-block of a format with shared microexponents.

    A block has the exponent E of its largest value. A sub-block whose values all have a smaller
    exponent halves its step and gains a bit of precision (Rouhani et al. 2023, "With Shared
    Microexponents, A Little Shifting Goes a Long Way", section 3).

    Example: sub-blocks with the largest magnitudes (5, 3, 0.5) have the exponents (2, 1, -1), and
    E = 2. The steps of MX9, with 6 bits below the leading bit, are 2^-4, 2^-5 and 2^-5: the shift
    is one bit, however much smaller the values are.

    Args:
        amax: Largest magnitude of each sub-block.
        fmt: The format.
        axis: Axis of the sub-blocks.
    """
    own = exponent_of(amax).movedim(axis, -1)
    count, per_block = own.shape[-1], fmt.block // fmt.sub_block
    padded = F.pad(own, (0, -count % per_block), value=MIN_EXPONENT)
    blocks = padded.reshape(*padded.shape[:-1], padded.shape[-1] // per_block, per_block)
    top = blocks.amax(-1, keepdim=True)
    step = top - (blocks < top).to(torch.int32) - fmt.bits + 2
    return step.reshape(padded.shape)[..., :count].movedim(-1, axis)


def block_exponent(lo: torch.Tensor, hi: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the exponent of the step of block floating point, for blocks within [lo, hi].

    It is the exponent of the largest magnitude minus the mantissa width, plus 1 if that value
    would round beyond the codes. Example, codes of 8 bits: 127.4 rounds to code 127 under the step
    2^0; 127.5 would round to 128, so its step is 2^1.
    """
    exponent = exponent_of(torch.maximum(-lo, hi)) - (fmt.bits - 2)
    step = power_of_two(exponent.clamp(min=-149))
    beyond = ((hi / step).round() > fmt.qmax) | ((lo / step).round() < fmt.qmin)
    return exponent + beyond.to(torch.int32)
