"""Ranges of groups of weights, smaller or larger, where that reduces the error of the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from quark.torch.algorithm.layers import (
    group_width,
    has_scales_per_row,
    rounds_rows_apart,
    weight_matrix,
)
from quark.torch.numerics.pieces import join_rows
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.products.native_inputs import fake_quantize
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.observer.observer import MinMaxObserver
from quark.torch.quantization.observer.super_blocks import SuperBlockObserver

FRACTIONS = tuple(1 - i / 20 for i in range(1, 11))  # of the range: 0.95 … 0.5
LARGER = (1.25, 1.5, 2.0)  # factors of ranges: 1.5 makes the largest value 4 instead of 6
# Factors from a half to 2, each 1.065 times the one before. Neighbours in e4m3 and e5m3 differ by
# at least 1.067, so every scale in these formats is tried.
CLOSE = tuple(2 ** (i / 11) for i in range(-11, 12) if i)
ENDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)  # factors of one end of a range
ROUNDS = 2  # of moves of both ends
FEW_BITS = 3  # with more, both ends at once are as good
CHUNK = 1 << 24  # elements of the rows that are compared at a time: a few launches for a layer
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
        so that no group can be compared alone, or where super-blocks fit their scales.
    """
    return _with_best_factors(layer, gram, FRACTIONS)


@torch.no_grad()
def weight_with_best_ranges(layer: FakeQuantizedLayer, gram: torch.Tensor) -> torch.Tensor | None:
    """Return values with the ranges of groups under which the weight is rounded best.

    As ``clip_weight``; in addition, groups of floats of 4 bits may have larger ranges than their
    values. The steps of such a format grow with the value: fp4 has 4 and 6, and nothing between.
    So the largest values of a group may be closer to multiples of 4 and 3 than of 6 and 4. The next
    larger power of two doubles all steps, and gains nothing once later columns compensate. Where
    scales are numbers of 8 bits (NVFP4), all of them from half to twice the usual one are tried,
    under the tensor scale that is stored. Under zero points of up to 3 bits, both ends of a range
    move by themselves, so that scale and zero point are chosen together (NeUQI, Lin et al. 2025,
    arXiv 2505.17595).

    Returns:
        Values for scales to be computed from, in the shape of the weight; or None, as there.
    """
    assert layer.weight_quantizer is not None
    scheme = layer.weight_quantizer.scheme
    is_coarse = scheme.fmt.is_float and scheme.fmt.bits <= 4
    grows = is_coarse and not (scheme.scale.power_of_two or scheme.shares_exponents)
    has_ends = not (scheme.symmetric or scheme.fmt.is_float or scheme.scale.span)
    moves_ends = has_ends and scheme.fmt.bits <= FEW_BITS
    factors = (*FRACTIONS, *(LARGER if grows else ()))
    if grows and scheme.scale.fmt is not None and not scheme.scale.span:
        factors = CLOSE
    tensor_scale = layer.weight_quantizer.scale_2 if scheme.scale.two_level else None
    return _with_best_factors(layer, gram, factors, moves_ends, tensor_scale)


def _with_best_factors(
    layer: FakeQuantizedLayer,
    gram: torch.Tensor,
    factors: Sequence[float],
    moves_ends: bool = False,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the weight with the best factor for the range of each group; see ``clip_weight``.

    Block scales of two levels are relative to ``tensor_scale``, or to that of the ranges tried.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    if isinstance(quantizer.observer, SuperBlockObserver):  # which has no use for ranges
        return None
    matrix = weight_matrix(layer)
    width = group_width(quantizer.scheme, matrix.shape[1])
    if not has_scales_per_row(layer) or matrix.shape[1] % width:
        return None
    gram_blocks = [_diagonal_blocks(own, width) for own in gram.view(-1, *gram.shape[-2:])]

    def fake_quantize_(rows: torch.Tensor, ranges: torch.Tensor | None) -> torch.Tensor:
        values = layer.from_matrix(rows)
        if ranges is not None:
            ranges = layer.from_matrix(ranges)
            return layer.to_matrix(quantizer.fake_quantize_(values, ranges, tensor_scale))
        rounded = _by_kernel(quantizer, values, tensor_scale)
        if rounded is None:
            rounded = quantizer.fake_quantize_(values, values, tensor_scale)
        return layer.to_matrix(rounded)

    chunk = CACHED if matrix.device.type == "cpu" else CHUNK
    step = max(1, chunk // matrix.shape[1]) if rounds_rows_apart(layer) else len(matrix)
    result = torch.empty_like(matrix)
    for start in range(0, len(matrix), step):
        rows = matrix[start : start + step]
        result[start : start + step] = _scale_ranges(
            rows,
            width,
            gram_blocks,
            factors,
            fake_quantize_,
            quantizer.scheme,
            moves_ends,
            isinstance(quantizer.observer, MinMaxObserver),
        )
    return layer.from_matrix(result)


def _by_kernel(
    quantizer: TensorQuantizer, x: torch.Tensor, tensor_scale: torch.Tensor | None
) -> torch.Tensor | None:
    """Return ``x`` fake-quantized under scales for its own range, None where no kernel does this.

    The kernel is that of dynamic inputs, whose scales are those of static ranges of one tensor.
    """
    observer = quantizer.observer
    takes_range = isinstance(observer, MinMaxObserver) and observer.scheme == quantizer.scheme
    if not takes_range or quantizer.spec.quantizes_codes:
        return None
    return fake_quantize(x, None, None, quantizer.scheme, tensor_scale)


def _scale_ranges(
    rows: torch.Tensor,
    width: int,
    gram_blocks: Sequence[torch.Tensor],
    factors: Sequence[float],
    fake_quantize_: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    scheme: Scheme,
    moves_ends: bool = False,
    sees_ends: bool = False,
) -> torch.Tensor:
    """Return rows of a weight, (rows, inputs), with the best range of each group.

    A group is clipped for a factor below 1, and multiplied by a factor above 1.

    Args:
        rows: (rows, inputs).
        width: Adjacent weights that share a scale.
        gram_blocks: (groups, width, width) for each group of inputs, which meets as many rows.
        factors: Factors of ranges to try beside 1.
        fake_quantize_: Rounds rows under the scales of others, None for their own; may write to
            the rows.
        scheme: How the weight is quantized. Groups of a super-block, whose scales depend on each
            other, keep their ranges if the best factors of all are worse together.
        moves_ends: Whether the ends of the best range are then moved by themselves; see
            ``_move_ends``.
        sees_ends: Whether scales depend on the ends of a range alone.
    """
    groups = rows.reshape(len(rows), -1, width)  # (rows, groups, width)
    low, high = _ends(groups, scheme)

    def error(values: torch.Tensor, ranges: torch.Tensor | None = None) -> torch.Tensor:
        """Return the errors of the groups; the values are overwritten."""
        rounded = fake_quantize_(values.flatten(1), None if ranges is None else ranges.flatten(1))
        change = rounded.reshape(groups.shape).sub_(groups)
        parts = zip(change.chunk(len(gram_blocks)), gram_blocks, strict=True)
        return join_rows([_squared_errors(part, own) for part, own in parts]).unsqueeze(-1)

    def scale(factors: torch.Tensor) -> torch.Tensor:
        moved = (groups * factors.clamp(min=1)).clamp_(factors * low, factors * high)
        # The near end of signed scales lies within the values.
        return torch.where(factors == 1, groups, moved) if scheme.signed_scales else moved

    best, unchanged = torch.ones_like(high), error(groups.clone())
    lowest = unchanged
    candidate = torch.empty_like(groups)
    for factor in factors:
        if factor < 1:
            loss = error(torch.clamp(groups, factor * low, factor * high, out=candidate))
        else:
            loss = error(groups.clone(), torch.mul(groups, factor, out=candidate))
        better = loss < lowest
        best.masked_fill_(better, factor)
        lowest = torch.where(better, loss, lowest)
    if scheme.scale.span:
        gain = unchanged - error(groups.clone(), scale(best))
        best = best.where(_sums(gain, scheme.scale.span) > 0, 1)
    ranges = scale(best)
    if moves_ends:
        ranges = _move_ends(groups, ranges, lowest, error, sees_ends)
    return ranges.flatten(1)


def _ends(groups: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ends between which all values of groups lie, (rows, groups, 1) each.

    Both are as far from zero as the farthest value. Under signed scales, the end on its other side
    is nearer, so that the scale of clipped values has the same sign.

    Args:
        groups: (rows, groups, width).
        scheme: How they are quantized.
    """
    amax = groups.abs().amax(-1, keepdim=True)
    if not scheme.signed_scales:
        return -amax, amax
    # Example, int4: -1 … 0.9 has the ends -1 and 7/8, which are the codes -8 and 7 times 1/8.
    fmt = scheme.fmt
    near = amax * ((fmt.qmax - fmt.middle) / (fmt.middle - fmt.qmin))
    is_up = groups.amax(-1, keepdim=True) > -groups.amin(-1, keepdim=True)
    return torch.where(is_up, -near, -amax), torch.where(is_up, amax, near)


def _move_ends(
    groups: torch.Tensor,
    ranges: torch.Tensor,
    lowest: torch.Tensor,
    error: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sees_ends: bool,
) -> torch.Tensor:
    """Return ranges whose ends lie where each group is rounded best, one end after the other.

    An end is a multiple of that of the group, as in ``ENDS``: inside, its values are clipped;
    outside, other values come closer to the grid.

    Args:
        groups: Weights, (rows, groups, width).
        ranges: Values with the ranges to begin with, in the same shape.
        lowest: Errors under these, (rows, groups, 1).
        error: Returns the errors of groups under ranges; may overwrite its first argument.
        sees_ends: Whether errors depend on the ends of the ranges alone.
    """
    # Example at 2 bits, codes 0 … 3: a group from -1 to 1.4 has the scale 0.8 and the zero point 1,
    # so its grid is -0.8, 0, 0.8, 1.6. Ends of -0.7 and 1.4 give the grid -0.7, 0, 0.7, 1.4.
    outer = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    ends = [ranges.amin(-1, keepdim=True).clamp(max=0), ranges.amax(-1, keepdim=True).clamp(min=0)]

    def between(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        moved = torch.where(groups >= outer[1], high, groups)
        return torch.where(groups <= outer[0], low, moved).clamp_(low, high)

    shown = torch.zeros_like(groups)

    def values_with(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        if not sees_ends or groups.shape[-1] == 1:
            return between(low, high)
        shown[..., :1], shown[..., 1:2] = low, high
        return shown

    for side in [0, 1] * ROUNDS:
        best = ends[side]
        for factor in ENDS:
            tried = [*ends]
            tried[side] = factor * outer[side]
            loss = error(groups.clone(), values_with(*tried))
            better = loss < lowest
            lowest = torch.where(better, loss, lowest)
            best = torch.where(better, tried[side], best)
        ends[side] = best
    return between(*ends)


def _sums(x: torch.Tensor, span: int) -> torch.Tensor:
    """Return the sum over the super-block of each group, for (rows, groups, 1)."""
    rows, groups, _ = x.shape
    padded = functional.pad(x.view(rows, groups), (0, -groups % span)).view(rows, -1, span)
    sums = padded.sum(-1, keepdim=True).expand_as(padded).flatten(1)
    return sums[:, :groups].unsqueeze(-1)


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
