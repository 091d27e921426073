"""fp4 and fp6 in blocks under given scales, by the names that serving software imports."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch.kernel.blocks import block_scheme, element_format
from quark.torch.numerics.custom_operators import fake_quantize
from quark.torch.numerics.granularity import Blocks
from quark.torch.numerics.scheme import Scheme


def fake_quantize_fp4_fp6_per_group_with_scale(
    input_tensor: torch.Tensor,
    scale: torch.Tensor,
    axis: int,
    group_size: int,
    quant_dtype: str | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return values rounded to fp4 or fp6 under given scales, in their type.

    Args:
        input_tensor: Values.
        scale: Powers of two, one for each block; blocks run along ``axis``.
        axis: Axis of the blocks.
        group_size: Elements of a block.
        quant_dtype: ``fp4``, ``fp6_e2m3`` or ``fp6_e3m2``.
        kwargs: Accepted for compatibility.

    Raises:
        ValueError: The format is not known, or there is another number of scales than of blocks.
    """
    scheme = block_scheme(element_format(quant_dtype), axis % input_tensor.dim(), group_size)
    return fake_quantize(input_tensor, _grid(scale, input_tensor, scheme), None, scheme)


def dequantize_fp4_fp6_per_group(
    inputs: torch.Tensor, scale: torch.Tensor, axis: int, group_size: int, **kwargs: Any
) -> torch.Tensor:
    """Return values of elements times the scales of their blocks, float32.

    Args:
        inputs: Values of the elements, as ``pack.create_pack_method`` unpacks them.
        scale: One for each block.
        axis: Axis of the blocks.
        group_size: Elements of a block.
        kwargs: Accepted for compatibility, ``quant_dtype`` among them.

    Raises:
        ValueError: There is another number of scales than of blocks.
    """
    scheme = block_scheme(element_format("fp4"), axis % inputs.dim(), group_size)
    blocks: Blocks = scheme.blocks(inputs.shape)
    return blocks.join(blocks.split(inputs.float()) * blocks.spread(scale.float()))


def _grid(scale: torch.Tensor, x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return scales in the shape of the grid of blocks."""
    shape = scheme.scale_shape(x.shape)
    scheme.blocks(x.shape).spread(scale)  # raises for another number of scales
    return scale.float().reshape(shape)
