"""Scales as they are stored, and back: exponents, narrow floats, exponents with shift bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.numerics.codec import decode, encode
from quark.torch.numerics.exponents import exponent_of, power_of_two
from quark.torch.numerics.formats import Format
from quark.torch.numerics.rounding import RoundType, round_to_grid_
from quark.torch.numerics.scheme import Scheme

BIAS = 127


def stored_shape(grid: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    """Return the shape in which scales of shape ``grid`` are stored.

    Formats with shift bits store, for each block along the last axis, the bytes (exponent, shifts
    of eight sub-blocks, ...), so that axis gives way to two: blocks and bytes.
    """
    fmt = scheme.fmt
    if not fmt.sub_block:
        return grid
    along = _last(grid, scheme)
    return (*along[:-1], -(-along[-1] // _per_block(fmt)), 1 + _shift_bytes(fmt))


def stored_dtype(scheme: Scheme) -> torch.dtype:
    """Return the type in which scales are stored."""
    return torch.uint8 if scheme.fmt.block else scheme.scale.dtype


def encode_scale(
    scale: torch.Tensor, scheme: Scheme, tensor_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return scales as they are stored.

    Args:
        scale: Scales as they are multiplied, in the natural shape of the scheme.
        scheme: How the tensor is quantized.
        tensor_scale: Scale of the scales, where there is one.
    """
    fmt, to = scheme.fmt, scheme.scale
    if scheme.shares_exponents:
        step = _exponent(scale.float())
        if fmt.sub_block:
            return _with_shifts(step.movedim(scheme.axis, -1), fmt)
        return (step + _step_offset(fmt) + BIAS).to(torch.uint8)
    if to.fmt is None or to.dtype == torch.float32:
        return scale.to(to.dtype)
    ratio = scale
    if tensor_scale is not None:  # the product was rounded, so the quotient may be off the grid
        ratio = round_to_grid_(scale / tensor_scale, to.fmt, RoundType.half_even)
    return ratio.to(to.dtype) if to.dtype.is_floating_point else encode(ratio, to.fmt).to(to.dtype)


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
            count = _last(scheme.scale_shape(shape), scheme)[-1]
            return power_of_two(_without_shifts(stored, fmt, count).movedim(-1, scheme.axis))
        return power_of_two(stored.to(torch.int32) - BIAS - _step_offset(fmt))
    if to.fmt is None or to.dtype == torch.float32:
        return stored
    ratio = stored.float() if stored.is_floating_point() else decode(stored, to.fmt)
    return ratio if tensor_scale is None else ratio * tensor_scale


def _step_offset(fmt: Format) -> int:
    """Difference between the stored exponent of a block and that of a step of its codes."""
    return fmt.bits - 2 if fmt.block else fmt.fraction_bits


def _exponent(scale: torch.Tensor) -> torch.Tensor:
    """Return the exponent of powers of two down to the smallest subnormal."""
    tiny = scale < 2.0**-126
    return torch.where(tiny, exponent_of(scale * 2.0**64) - 64, exponent_of(scale))


def _per_block(fmt: Format) -> int:
    return fmt.block // fmt.sub_block


def _shift_bytes(fmt: Format) -> int:
    return -(-_per_block(fmt) // 8)


def _last(grid: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    axis = scheme.axis % len(grid)
    return (*grid[:axis], *grid[axis + 1 :], grid[axis])


def _with_shifts(step: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Exponents of the steps of sub-blocks (..., n) to bytes (..., blocks, 1 + shift bytes)."""
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
