"""Scales of fp4 blocks whose largest value becomes 4 instead of 6, where that loses less.

fp4 has no number between 4 and 6, so a value of 5/6 of the largest one of its block is rounded by a
fifth. Under a scale of 1.5 times the usual one, the largest value is 4, and 5/6 of it lies between
3 and 4 (Cook et al. 2025, "Four Over Six", arXiv 2512.02010).
"""

from __future__ import annotations

from functools import reduce

import torch

from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.numerics.scheme import Scheme

WIDER = 1.5  # 6 / 4


def choose_scales(
    x: torch.Tensor, six: torch.Tensor, four: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Return for each block the scale of less squared error, ``six`` where both have as much.

    Args:
        x: Values.
        six: Scales under which the largest values are 6, in the shape of the scales of ``x``.
        four: Scales under which they are 4.
        scheme: How the tensor is quantized; its blocks are groups.
    """
    blocks = scheme.blocks(x.shape)
    values = blocks.split(x.detach()).float()
    [axis] = blocks.reduced
    errors = []
    for scale in (six, four):
        by = blocks.spread(scale.float())
        rounded = round_to_grid_(values / by, scheme.fmt, scheme.rounding).mul_(by)
        parts = rounded.sub_(values).square_().unbind(axis)
        errors.append(reduce(torch.add, parts))  # in this order, whatever the shape
    return torch.where((errors[1] < errors[0]).reshape(six.shape), four, six)
