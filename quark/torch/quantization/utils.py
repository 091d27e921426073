"""Blocks and their scales, by the names that serving software imports."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quark.torch.kernel.blocks import element_format
from quark.torch.numerics.exponents import power_of_two, shared_exponent
from quark.torch.numerics.formats import Dtype


def even_round(max_abs: torch.Tensor, dtype: Dtype | str) -> torch.Tensor:
    """Return the scales of blocks by their largest magnitudes, float32 powers of two.

    Args:
        max_abs: Largest magnitudes.
        dtype: Format of the elements: ``fp4``, ``fp6_e2m3`` or ``fp6_e3m2``.

    Raises:
        ValueError: The format is not one of these.
    """
    return power_of_two(shared_exponent(max_abs.float(), element_format(dtype), "even"))


def reshape_to_blocks(x: torch.Tensor, block_size: int, axis: int) -> torch.Tensor:
    """Return (…, blocks, block_size), with ``axis`` moved to the end and padded with zeros.

    Args:
        x: Values.
        block_size: Elements of a block.
        axis: Axis of the blocks.
    """
    moved = x.movedim(axis, -1)
    padded = F.pad(moved, (0, -moved.shape[-1] % block_size))
    return padded.reshape(*padded.shape[:-1], -1, block_size)
