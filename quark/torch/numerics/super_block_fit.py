"""Scales and minima of super-blocks that minimize the squared error of a weight.

A range from the smallest to the largest value of a block gives its far values more than they are
worth. Three steps find a better scale s and minimum m, under which a code c stands for s c + m:

1. Each block tries several scales. A scale gives codes, and codes give the scale and the minimum
   of least squares, which give codes again.
2. The scales and minima of a super-block are rounded to integers times one number each.
3. Each block takes the best of its integers and their neighbours: the other one of the two may
   make up for what rounding did to one.

The first step alternates as Lloyd's quantizer does (Least squares quantization in PCM, 1982), with
values that are equally spaced.
"""

from __future__ import annotations

from itertools import product

import torch

from quark.torch.numerics.qdq import QParams
from quark.torch.numerics.scales import EPS
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.super_blocks import unit_of

CANDIDATES = 9  # scales to try: from one code more than the range needs to one code less
ROUNDS = 2  # of codes and least squares from each of them
NEIGHBOURS = (0, -1, 1)
_MOST = 2.0  # factor by which a scale may differ from that of the range


def fit(values: torch.Tensor, start: QParams, scheme: Scheme) -> QParams:
    """Return scales and zero points of super-blocks with the least squared error.

    Args:
        values: (super-blocks, span, width) float32, finite.
        start: Scales and zero points of ranges of the values, (super-blocks, span). They are not
            in super-blocks yet.
        scheme: How the values are quantized, with a ``span``.

    Returns:
        As ``start``, in super-blocks; zero points are float32 if the scheme is not symmetric.
    """
    fmt, integer = scheme.fmt, scheme.scale.fmt
    assert integer is not None
    scale, minimum = (x.squeeze(-1) for x in _fit_blocks(values, start[0].unsqueeze(-1), scheme))
    unit = unit_of(scale.abs().clamp(min=EPS), integer)
    signed = torch.where(scale < 0, -unit, unit)
    units, integers, least = [signed], [scale / signed], [1]
    if not scheme.symmetric:
        unit = unit_of(-minimum, integer)
        units, integers, least = [signed, unit], [*integers, -minimum / unit], [1, 0]
    rounded = [n.round().clamp_(low, integer.qmax) for n, low in zip(integers, least, strict=True)]
    best = _best_neighbours(values, units, rounded, least, scheme)
    scale, *depths = (n * unit for n, unit in zip(best, units, strict=True))
    if scheme.symmetric:
        return scale, torch.full_like(scale, fmt.middle, dtype=torch.int32)
    return scale, fmt.qmin + depths[0] / scale


def _fit_blocks(
    values: torch.Tensor, start: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the minimum of each block, (…, 1), the first step.

    Args:
        values: (…, width).
        start: Scales of ranges, (…, 1).
        scheme: How the values are quantized; minima are 0 if it is symmetric.
    """
    fmt, width = scheme.fmt, values.shape[-1]
    lowest = values.amin(-1, keepdim=True).clamp_(max=0)
    begin = torch.zeros_like(lowest) if scheme.symmetric else lowest
    steps = fmt.middle - fmt.qmin if scheme.signed_scales else fmt.qmax - fmt.qmin
    total = values.sum(-1, keepdim=True)
    best, least = (start, begin), torch.full_like(start, torch.inf)
    for index in range(CANDIDATES):
        change = 2 * index / (CANDIDATES - 1) - 1  # from -1 to 1
        scale, minimum = start * (steps / (steps + change)), begin
        for _ in range(ROUNDS):
            codes = _codes(values, scale, minimum, scheme)
            squares, products = codes.square().sum(-1, True), (codes * values).sum(-1, True)
            if scheme.symmetric:
                fitted, fitted_minimum = products / squares, minimum
            else:
                sums = codes.sum(-1, True)
                determinant = width * squares - sums * sums
                fitted = (width * products - sums * total) / determinant
                fitted_minimum = (total - sums * fitted) / width
                # No minimum is above zero. The best scale without one:
                is_above = fitted_minimum > 0
                fitted = torch.where(is_above, products / squares, fitted)
                fitted_minimum = fitted_minimum.clamp(max=0)
            ratio = fitted / start
            is_usable = (ratio > 1 / _MOST) & (ratio < _MOST)  # and not NaN
            scale = torch.where(is_usable, fitted, scale)
            minimum = torch.where(is_usable, fitted_minimum, minimum)
            error = (codes * scale).add_(minimum).sub_(values).square_().sum(-1, True)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best = (
                torch.where(is_better, scale, best[0]),
                torch.where(is_better, minimum, best[1]),
            )
    return best


def _best_neighbours(
    values: torch.Tensor,
    units: list[torch.Tensor],
    integers: list[torch.Tensor],
    least: list[int],
    scheme: Scheme,
) -> list[torch.Tensor]:
    """Return the integers of scales, and of minima, with the least squared error: the third step.

    Args:
        values: (super-blocks, span, width).
        units: Numbers that the integers are times, (super-blocks, 1) or (super-blocks, span); with
            the sign of the scales.
        integers: Those of scales, then those of minima if there are any, (super-blocks, span).
        least: Smallest integer of each.
        scheme: How the values are quantized.
    """
    assert scheme.scale.fmt is not None
    top = scheme.scale.fmt.qmax
    best, lowest = integers, torch.full_like(integers[0], torch.inf)
    for offsets in product(NEIGHBOURS, repeat=len(integers)):
        moved = [
            (n + offset).clamp_(low, top)
            for n, offset, low in zip(integers, offsets, least, strict=True)
        ]
        scale, *depths = ((n * unit).unsqueeze(-1) for n, unit in zip(moved, units, strict=True))
        minimum = -depths[0] if depths else torch.zeros_like(scale)
        codes = _codes(values, scale, minimum, scheme)
        error = codes.mul_(scale).add_(minimum).sub_(values).square_().sum(-1)
        is_better = error < lowest
        lowest = torch.where(is_better, error, lowest)
        best = [torch.where(is_better, n, kept) for n, kept in zip(moved, best, strict=True)]
    return best


def _codes(
    values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Return the nearest codes of values, less the code of the minimum or of zero, as float32."""
    fmt = scheme.fmt
    zero = fmt.middle if scheme.symmetric else fmt.qmin
    codes = (values - minimum).div_(scale).round_()
    return codes.clamp_(fmt.qmin - zero, fmt.qmax - zero)
