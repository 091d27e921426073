"""Clipping of weights: a smaller range per group, where that reduces the error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quark.torch.algorithm.layers import (
    group_width,
    has_scales_per_row,
    rounds_rows_apart,
    weight_matrix,
)
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

FRACTIONS = tuple(1 - i / 20 for i in range(1, 11))  # of the range: 0.95 … 0.5
CHUNK = 1 << 21  # elements of the rows that are compared at a time
CACHED = 1 << 19  # of these on a CPU: they and their changes fit its cache


@torch.no_grad()
def clip_weight(layer: FakeQuantizedLayer, gram: torch.Tensor) -> torch.Tensor | None:
    """Return the weight of a layer with the best clipping of each group.

    The search tries fractions of the range of each group of a row, and compares the errors of the
    outputs that the group alone causes: d G dᵀ for its change d and its diagonal block of G.
    Section 3.2 of AWQ (Lin et al. 2024).

    Args:
        layer: A layer with a quantized weight.
        gram: Sum G of x xᵀ over its inputs, (inputs, inputs) or (groups, inputs, inputs), up to a
            positive factor.

    Returns:
        The clipped weight, or None where rows share scales or the width is not divisible by groups,
        so that no group can be compared alone.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    matrix = weight_matrix(layer)
    width = group_width(quantizer.scheme, matrix.shape[1])
    if not has_scales_per_row(layer) or matrix.shape[1] % width:
        return None
    gram_blocks = [_diagonal_blocks(own, width) for own in gram.view(-1, *gram.shape[-2:])]

    def fake_quantize(rows: torch.Tensor) -> torch.Tensor:
        return layer.to_matrix(quantizer.fake_quantize_copy(layer.from_matrix(rows)))

    chunk = min(CHUNK, CACHED) if matrix.device.type == "cpu" else CHUNK
    step = max(1, chunk // matrix.shape[1]) if rounds_rows_apart(layer) else len(matrix)
    clipped = torch.empty_like(matrix)
    for start in range(0, len(matrix), step):
        rows = matrix[start : start + step]
        clipped[start : start + step] = _clip_rows(rows, width, gram_blocks, fake_quantize)
    return layer.from_matrix(clipped)


def _clip_rows(
    rows: torch.Tensor,
    width: int,
    gram_blocks: Sequence[torch.Tensor],
    fake_quantize: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return rows of a weight, (rows, inputs), with the best clipping of each group.

    Args:
        rows: (rows, inputs).
        width: Adjacent weights that share a scale.
        gram_blocks: (groups, width, width) for each group of inputs, which meets as many rows.
        fake_quantize: Rounds rows.
    """
    groups = rows.reshape(len(rows), -1, width)  # (rows, groups, width)
    amax = groups.abs().amax(-1, keepdim=True)

    def error(candidate: torch.Tensor) -> torch.Tensor:
        change = fake_quantize(candidate.flatten(1)).reshape(groups.shape) - groups
        parts = zip(change.chunk(len(gram_blocks)), gram_blocks, strict=True)
        return torch.cat([_squared_errors(part, own) for part, own in parts]).unsqueeze(-1)

    best, lowest = amax, error(groups)  # bounds of the groups; the first one clips nothing
    candidate = torch.empty_like(groups)
    for fraction in FRACTIONS:
        bound = fraction * amax
        loss = error(torch.clamp(groups, -bound, bound, out=candidate))
        better = loss < lowest
        best, lowest = torch.where(better, bound, best), torch.where(better, loss, lowest)
    return groups.clamp(-best, best).flatten(1)


def _squared_errors(change: torch.Tensor, gram_blocks: torch.Tensor) -> torch.Tensor:
    """Return d G dᵀ for the change d of each group of each row, (rows, groups).

    Args:
        change: (rows, groups, width).
        gram_blocks: G of each group, (groups, width, width).
    """
    by_group = change.transpose(0, 1)  # (groups, rows, width)
    return torch.bmm(by_group, gram_blocks).mul_(by_group).sum(-1).T


def _diagonal_blocks(gram: torch.Tensor, width: int) -> torch.Tensor:
    """Return the blocks along the diagonal, (groups, width, width)."""
    count = len(gram) // width
    blocks = gram.view(count, width, count, width)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)
