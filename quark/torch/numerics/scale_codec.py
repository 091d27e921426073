"""Stored scales and back: biased exponents, narrow floats, exponents with shift bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.numerics.codec import decode, encode
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.exponents import exponent_of, power_of_two
from quark.torch.numerics.formats import Format
from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.numerics.scheme import Scheme

BIAS = 127


def stored_shape(grid: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    """Return the shape in which scales of shape ``grid`` are stored.

    Formats with shift bits store the bytes (exponent, shifts of eight sub-blocks, ...) for each
    block. The quantized axis moves to the end and becomes two axes: blocks and bytes. Example,
    MX9 over (4, 64): scales of (4, 32) sub-blocks are stored as (4, 4, 2).
    """
    fmt = scheme.fmt
    if not fmt.sub_block:
        return grid
    moved = _axis_last(grid, scheme)
    return (*moved[:-1], -(-moved[-1] // _per_block(fmt)), 1 + _shift_bytes(fmt))


def stored_dtype(scheme: Scheme) -> torch.dtype:
    """Return the type in which scales are stored."""
    return torch.uint8 if scheme.fmt.block else scheme.scale.stored_dtype


def encode_scale(
    scale: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scales in the stored type and shape.

    Args:
        scale: Scales that codes are multiplied by, of shape ``scheme.scale_shape``.
        scheme: How the tensor is quantized.
        tensor_scale: Tensor scale [] of two-level scales, or None.
    """
    fmt, to = scheme.fmt, scheme.scale
    if scheme.shares_exponents:
        step = _exponent(scale.float())
        if fmt.sub_block:
            return _with_shifts(step.movedim(scheme.axis, -1), fmt)
        return (step + _step_offset(fmt) + BIAS).to(torch.uint8)
    if to.fmt is None or to.stored_dtype == torch.float32:
        return scale.to(to.stored_dtype)
    ratio = scale
    # Scale = ratio * tensor scale was rounded to float32, so the quotient may be a float32 step
    # beside the ratio: rounding it to the grid recovers the ratio exactly.
    if tensor_scale is not None:
        ratio = round_to_grid_(scale / tensor_scale, to.fmt, RoundType.half_even)
    dtype = to.stored_dtype
    return ratio.to(dtype) if dtype.is_floating_point else encode(ratio, to.fmt).to(dtype)


def decode_scale(
    stored: torch.Tensor,
    scheme: Scheme,
    shape: tuple[int, ...],
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scales of a tensor of shape ``shape``: the inverse of ``encode_scale``."""
    fmt, to = scheme.fmt, scheme.scale
    if scheme.shares_exponents:
        if fmt.sub_block:
            count = _axis_last(scheme.scale_shape(shape), scheme)[-1]
            return power_of_two(_without_shifts(stored, fmt, count).movedim(-1, scheme.axis))
        return power_of_two(stored.to(torch.int32) - BIAS - _step_offset(fmt))
    if to.fmt is None or to.stored_dtype == torch.float32:
        return stored
    ratio = stored.float() if stored.is_floating_point() else decode(stored, to.fmt)
    return ratio if tensor_scale is None else ratio * tensor_scale


def _step_offset(fmt: Format) -> int:
    """Return the stored exponent of a block minus the exponent of the step of its codes.

    Example: MX9 stores E = 2 for values up to 7.9. Its codes of 8 bits reach 127, so the step is
    2^-4 and the difference 6 = bits - 2.
    """
    return fmt.bits - 2 if fmt.block else fmt.fraction_bits


def _exponent(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponents of powers of two from 2^127 down to the smallest subnormal, 2^-149."""
    # Subnormal numbers have no exponent bits: 2^-130 * 2^64 = 2^-66 has.
    tiny = scale < 2.0**-126
    if scale.device.type == "cpu" and not bool(tiny.any()):
        return exponent_of(scale)
    return torch.where(tiny, exponent_of(scale * 2.0**64) - 64, exponent_of(scale))


def _per_block(fmt: Format) -> int:
    return fmt.block // fmt.sub_block


def _shift_bytes(fmt: Format) -> int:
    return -(-_per_block(fmt) // 8)


def _axis_last(grid: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    axis = scheme.axis % len(grid)
    return (*grid[:axis], *grid[axis + 1 :], grid[axis])


def _with_shifts(step: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return exponents of steps (..., sub-blocks) as bytes (..., blocks, 1 + shift bytes).

    Example, a block of MX9 whose 8 sub-blocks have the steps 2^-4, 2^-5, ..., 2^-5: E = -4 + 6 = 2
    is stored as 129, and the shift bits of all sub-blocks but the first as 0b11111110 = 254.
    """
    size, width = _per_block(fmt), _shift_bytes(fmt)
    padded = F.pad(step, (0, -step.shape[-1] % size), value=-(1 << 20))
    blocks = padded.reshape(*padded.shape[:-1], -1, size)
    top = blocks.amax(-1, keepdim=True)
    shifted = F.pad((blocks == top - 1).to(torch.int32), (0, 8 * width - size))
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.int32, device=step.device)
    shifts = (shifted.reshape(*shifted.shape[:-1], width, 8) * weights).sum(-1)
    exponent = top + _step_offset(fmt) + BIAS
    return torch.cat([exponent, shifts], -1).clamp_(0, 255).to(torch.uint8)


def _without_shifts(stored: torch.Tensor, fmt: Format, count: int) -> torch.Tensor:
    """Undo ``_with_shifts``."""
    stored = stored.to(torch.int32)
    exponent, shifts = stored[..., :1], stored[..., 1:]
    weights = torch.arange(8, dtype=torch.int32, device=stored.device)
    bits = (shifts.unsqueeze(-1) >> weights & 1).reshape(*shifts.shape[:-1], -1)
    step = exponent - BIAS - _step_offset(fmt) - bits[..., : _per_block(fmt)]
    return step.reshape(*step.shape[:-2], -1)[..., :count]
