"""Ranges smaller than those of the weights, where outputs change less for it."""

from __future__ import annotations

import torch

from quark.torch.algorithm.rescaling import as_rows
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed

SHARES = tuple(1 - i / 20 for i in range(1, 11))  # of the range: 0.95 … 0.5


@torch.no_grad()
def clipped(layer: QuantMixin, gram: torch.Tensor) -> torch.Tensor | None:
    """Return the weight with the largest values of each group cut off to the best extent.

    The search goes over shares of the range of each group of a row, and judges by the error of
    the outputs that the group alone causes.

    Args:
        layer: A layer with a quantized weight.
        gram: Sum of x xᵀ over its inputs, (inputs, inputs), by any positive factor.

    Returns:
        The weight, or None where rows share ranges, so that they cannot be judged apart.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    axis = 0 if is_transposed(layer.float_class) else 1
    rows = as_rows(layer.weight.detach(), axis).float()
    width = group_width(quantizer.scheme, rows.shape[1])
    if not rows_apart(quantizer.scheme, axis) or layer.weight.dim() != 2 or rows.shape[1] % width:
        return None
    pieces = rows.reshape(len(rows), -1, width)  # (outputs, groups, width)
    squares = _diagonal_blocks(gram, width)
    amax = pieces.abs().amax(-1, keepdim=True)

    def error(candidate: torch.Tensor) -> torch.Tensor:
        whole = candidate.flatten(1)
        rounded = quantizer.rounded(whole if axis else whole.T)
        change = as_rows(rounded, axis).reshape(pieces.shape) - pieces
        return torch.einsum("ogi,gij,ogj->og", change, squares, change).unsqueeze(-1)

    best, lowest = pieces, error(pieces)
    for share in SHARES:
        candidate = pieces.clamp(-share * amax, share * amax)
        loss = error(candidate)
        better = loss < lowest
        best, lowest = torch.where(better, candidate, best), torch.where(better, loss, lowest)
    whole = best.flatten(1)
    return whole if axis else whole.T


def group_width(scheme: Scheme, inputs: int) -> int:
    """Return how many neighbouring weights of a row share a range at most."""
    if scheme.fmt.block:
        return scheme.fmt.block
    if scheme.qscheme is QSchemeType.per_group and scheme.group > 0:
        return scheme.group
    if scheme.qscheme is QSchemeType.per_block and scheme.block is not None and scheme.block[1] > 0:
        return scheme.block[1]
    return inputs


def rows_apart(scheme: Scheme, axis: int) -> bool:
    """Whether every range is that of one row, or a part of it, given the axis of the inputs."""
    along = scheme.axis % 2 == axis
    per_row = scheme.qscheme is QSchemeType.per_channel and not along
    return per_row or (scheme.qscheme is QSchemeType.per_group and along)


def _diagonal_blocks(gram: torch.Tensor, width: int) -> torch.Tensor:
    """Return the blocks along the diagonal, (groups, width, width)."""
    count = len(gram) // width
    blocks = gram.view(count, width, count, width)
    return blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)
