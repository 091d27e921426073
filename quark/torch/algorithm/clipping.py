"""Clipping of weights: a smaller range per group, where that reduces the error of the outputs."""

from __future__ import annotations

import torch

from quark.torch.algorithm.layers import (
    group_width,
    has_scales_per_row,
    to_matrix,
    weight_matrix,
)
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

FRACTIONS = tuple(1 - i / 20 for i in range(1, 11))  # of the range: 0.95 … 0.5


@torch.no_grad()
def clip_weight(layer: FakeQuantizedLayer, gram: torch.Tensor) -> torch.Tensor | None:
    """Return the weight of a layer with the best clipping of each group.

    The search tries fractions of the range of each group of a row, and compares the errors of the
    outputs that the group alone causes: d G dᵀ for its change d and its diagonal block of G.
    Section 3.2 of AWQ (Lin et al. 2024).

    Args:
        layer: A layer with a quantized weight.
        gram: Sum G of x xᵀ over its inputs, (inputs, inputs), up to a positive factor.

    Returns:
        The clipped weight, or None where rows share scales or the width is not divisible by groups,
        so that no group can be compared alone.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    axis = layer.input_axis
    matrix = weight_matrix(layer)
    width = group_width(quantizer.scheme, matrix.shape[1])
    is_separable = has_scales_per_row(quantizer.scheme, axis) and layer.weight.dim() == 2
    if not is_separable or matrix.shape[1] % width:
        return None
    groups = matrix.reshape(len(matrix), -1, width)  # (outputs, groups, width)
    gram_blocks = _diagonal_blocks(gram, width)
    amax = groups.abs().amax(-1, keepdim=True)

    def error(candidate: torch.Tensor) -> torch.Tensor:
        flat = candidate.flatten(1)
        rounded = quantizer.fake_quantize_copy(flat if axis else flat.T)
        change = to_matrix(rounded, axis).reshape(groups.shape) - groups
        return torch.einsum("ogi,gij,ogj->og", change, gram_blocks, change).unsqueeze(-1)

    best, lowest = groups, error(groups)
    for fraction in FRACTIONS:
        candidate = groups.clamp(-fraction * amax, fraction * amax)
        loss = error(candidate)
        better = loss < lowest
        best, lowest = torch.where(better, candidate, best), torch.where(better, loss, lowest)
    flat = best.flatten(1)
    return flat if axis else flat.T


def _diagonal_blocks(gram: torch.Tensor, width: int) -> torch.Tensor:
    """Return the blocks along the diagonal, (groups, width, width)."""
    count = len(gram) // width
    blocks = gram.view(count, width, count, width)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)
