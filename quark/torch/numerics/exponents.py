"""Scales that are powers of two: exponents shared by the elements of a block.

Exponents are read from the bits of float32, where a logarithm is off by one just below a power of
two. Values below the smallest normal number count as zero.
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
    normal = (exponent.clamp(min=-126) + 127) << 23
    rest = exponent.clamp(max=-126) + 126  # 0, or what is left of a subnormal
    return normal.view(torch.float32) * torch.exp2(rest.float())


def shared_exponent(amax: torch.Tensor, fmt: Format, mode: str) -> torch.Tensor:
    """Return the exponent of the scale of blocks whose largest magnitude is ``amax``.

    ``floor`` is the conversion of the OCP Microscaling specification 1.0, section 6.3:
    floor(log2(amax)) less the largest exponent of the elements. ``ceil`` rounds the logarithm up.
    ``even`` first rounds amax, half up, to the mantissa of the elements, so that a block whose
    largest value would round beyond the range gets the next scale.

    Args:
        amax: Largest magnitudes, float32.
        fmt: Format of the elements.
        mode: ``even``, ``floor`` or ``ceil``.

    Returns:
        int32 exponents from -127 to 127.
    """
    bits = amax.view(torch.int32)
    if mode == "even":
        mantissa = fmt.mantissa_bits if fmt.is_float else fmt.bits
        bits = bits + (1 << (22 - mantissa))
    exponent = (bits >> 23 & 0xFF) - 127 - fmt.max_exponent
    if mode == "ceil":
        exponent += (bits & 0x7FFFFF) != 0
    return exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)


def micro_exponents(amax: torch.Tensor, fmt: Format, axis: int) -> torch.Tensor:
    """Return the exponent of the step of each sub-block of a shared-microexponent format.

    The exponent E of a block is that of its largest value; a sub-block whose values all have a
    smaller exponent gains a bit (Rouhani et al. 2023, "With Shared Microexponents, A Little
    Shifting Goes a Long Way", section 3).

    Args:
        amax: Largest magnitude of each sub-block.
        fmt: The format.
        axis: Axis along which sub-blocks follow each other.
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

    It is that of the largest magnitude less the width of the mantissa, and one more if that value
    would round beyond the codes.
    """
    exponent = exponent_of(torch.maximum(-lo, hi)) - (fmt.bits - 2)
    step = power_of_two(exponent.clamp(min=-149))
    beyond = ((hi / step).round() > fmt.qmax) | ((lo / step).round() < fmt.qmin)
    return exponent + beyond.to(torch.int32)
