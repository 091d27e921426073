"""Scales refitted to rounded values.

The squared error of the outputs of a row w is quadratic in the scales s of its groups once the
codes q are fixed, so the best scales solve A s = b with A_gh = q_gᵀ H_gh q_h and
b_g = q_gᵀ (H w)_g, where H is the mean of x xᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quark.torch.algorithm.layers import group_width, has_scales_per_row
from quark.torch.numerics.column_rounder import (
    Attempt,
    ColumnRounder,
    ColumnRounding,
    ZeroKeepingRounder,
)
from quark.torch.numerics.pieces import join_rows
from quark.torch.numerics.qdq import Factors
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.super_blocks import minima
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor

MAX_CHANGE = 2.0  # factor by which a scale may grow or shrink
# Elements of the matrices A, of the rows, and of the products that these are summed from.
CHUNK = 1 << 24  # a few launches for a layer
CACHED = 1 << 20  # on a CPU, whose cache they fit

RoundWeight = Callable[[ColumnRounding], torch.Tensor]  # returns it, (outputs, inputs)


@torch.no_grad()
def best_scales(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Return the scales with the least squared error of the outputs, (outputs, groups).

    A row keeps its scales if one of the best would be negative or change by more than
    ``MAX_CHANGE``. A group keeps its scale if all its codes are zero.

    Args:
        codes: (outputs, inputs) float32, zero points subtracted.
        scales: (outputs, groups) float32: the scales under which the codes were chosen.
        weight: (outputs, inputs) float32: the values to approximate.
        hessian: (inputs, inputs), positive definite.
    """
    outputs, groups = scales.shape
    width = len(hessian) // groups
    result = scales.clone()
    is_cpu = hessian.device.type == "cpu"
    step = max(1, (CACHED if is_cpu else CHUNK) // max(groups**2, len(hessian)))
    # On a CPU, the products of one group fit its cache.
    tile = 1 if is_cpu else max(1, CHUNK // (min(step, outputs) * len(hessian)))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        q = codes[rows].view(-1, groups, width)  # (rows, groups, width)
        b = (weight[rows] @ hessian).view_as(q).mul_(q).sum(-1)  # (rows, groups)
        # (rows, groups, groups): A is symmetric, so its lower triangle is enough.
        a = q.new_zeros(len(q), groups, groups)
        for g in range(0, groups, tile):
            a[:, g:, g : g + tile] = _tile_of_products(q, hessian, g, tile)
        unused = a.diagonal(dim1=1, dim2=2) <= 0
        a.diagonal(dim1=1, dim2=2).add_(unused)
        lower, failed = torch.linalg.cholesky_ex(a)
        right = torch.where(unused, scales[rows], b).unsqueeze(-1)
        best = torch.cholesky_solve(right, lower).squeeze(-1)
        change = best / scales[rows]
        accepted = ((change > 1 / MAX_CHANGE) & (change < MAX_CHANGE)).all(1) & (failed == 0)
        result[rows] = torch.where(accepted.unsqueeze(1), best, scales[rows])
    return result


def _tile_of_products(
    codes: torch.Tensor, hessian: torch.Tensor, first: int, tile: int
) -> torch.Tensor:
    """Return A_hg of each row for all groups h from ``first`` on, and the first of them as g.

    Args:
        codes: (rows, groups, width).
        hessian: (inputs, inputs).
        first: First group.
        tile: Number of groups g.

    Returns:
        (rows, groups - first, tile), with fewer groups g where fewer are left.
    """
    width = codes.shape[-1]
    later = codes[:, first:]  # (rows, groups - first, width)
    start = first * width
    parts = hessian[start : start + tile * width, start:]
    parts = parts.view(-1, width, len(hessian) - start)  # (tile, width, later inputs)
    # q_g H_g has an entry for each input of the groups h. Its product with q, summed over the width
    # of each group, is A_hg.
    products = torch.bmm(later[:, :tile].transpose(0, 1), parts)
    sums = products.view(-1, *later.shape).mul_(later).sum(-1)  # (tile, rows, groups - first)
    return sums.permute(1, 2, 0)


def round_and_refit(
    layer: FakeQuantizedLayer,
    weight: torch.Tensor,
    hessian: torch.Tensor,
    attempts: Sequence[RoundWeight],
) -> torch.Tensor:
    """Round a weight repeatedly and refit the scales to the codes after each time.

    Scales that are powers of two or fp8 numbers, or that several rows share, are not refitted;
    then only the last attempt runs. Minima in super-blocks do not change. The last attempt may
    refit scales itself (``ColumnRounding.round_rows``); where it does, they stay as it left them.

    Args:
        layer: A layer with final scales, which are replaced by the refitted ones.
        weight: (outputs, inputs) float32.
        hessian: (inputs, inputs) or (groups, inputs, inputs), positive definite.
        attempts: Functions that round the weight, in order.

    Returns:
        The result of the last attempt, under the refitted scales.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    refits = not quantizer.spec.quantizes_codes and can_refit(layer, weight)
    rounded = weight
    zeros = weight == 0 if layer.keeps_zeros else None
    for attempt in attempts if refits else attempts[-1:]:
        rounding = quantizer.column_rounder(tuple(layer.weight.shape), layer.to_matrix)
        fitting = None
        if attempt is attempts[-1] and refits and isinstance(rounding, ColumnRounder):
            rounding = fitting = FittingRounder.of(layer, rounding)
        rounded = attempt(rounding if zeros is None else ZeroKeepingRounder(rounding, zeros))
        if fitting is not None and fitting.scales.are_fitted:
            rounded = _write_scales_(layer, rounded, fitting.scales.values)
        elif refits:
            rounded = _refit_(layer, rounded, weight, hessian)
    return rounded


@dataclass
class RowScales:
    """Scales of a weight that change row by row.

    Attributes:
        values: (outputs, groups) float32.
        are_fitted: Whether any have been fitted.
    """

    values: torch.Tensor
    are_fitted: bool = False


class FittingRounder(ColumnRounder):
    """Rounds columns under scales that may be fitted; see ``ColumnRounding``.

    Attributes:
        scales: Scales of the whole weight, which ``round_rows`` changes.
        rows: Indices of its rows in the weight, (rows,) int64.
    """

    def __init__(
        self, factors: Factors, scheme: Scheme, scales: RowScales, rows: torch.Tensor
    ) -> None:
        super().__init__(factors, scheme)
        self.scales, self.rows = scales, rows

    @classmethod
    def of(cls, layer: FakeQuantizedLayer, rounding: ColumnRounder) -> FittingRounder:
        """Return the rounding of a layer whose scales may be fitted."""
        count = rounding.factors.scale.shape[1]
        scales = RowScales(_scales_by_row(layer).reshape(count, -1).float().clone())
        rows = torch.arange(count, device=scales.values.device)
        return cls(rounding.factors, rounding.scheme, scales, rows)

    def select_rows(self, rows: torch.Tensor) -> FittingRounder:
        """Return the rounding of some rows of every column, under the scales of now."""
        chosen = self.rows[rows]
        factors = _spread(self.scales.values[chosen], self.factors.select_rows(rows))
        return FittingRounder(factors, self.scheme, self.scales, chosen)

    def round_rows(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        hessian: torch.Tensor,
        attempt: Attempt,
        multiples: Sequence[float] = (1.0,),
    ) -> torch.Tensor:
        """Return some rows rounded by a function, and keep the scales that are fitted to them.

        Scales in super-blocks are left to ``round_and_refit``, since minima may belong to them.
        """
        if self.scheme.scale.span:
            return attempt(target, self.select_rows(rows))
        # Example: rows 4 and 9 under two multiples are rows 4, 9, 4, 9 here. If the first has the
        # least error under the second multiple, and the second under the first: 2 and 1 stay.
        count, chosen = len(multiples), self.rows[rows]
        old = self.scales.values[chosen].repeat(count, 1)
        by = torch.tensor(multiples, dtype=torch.float32, device=old.device)
        by = by.repeat_interleave(len(rows))
        old = _round_scale(old * by.unsqueeze(1), old, self.scheme)
        factors = _spread(old, self.factors.select_rows(rows.repeat(count)))
        targets = target.repeat(count, 1)
        values = attempt(targets, ColumnRounder(factors, self.scheme))
        groups = values.reshape(*old.shape, -1)
        new = best_scales((groups / old.unsqueeze(-1)).flatten(1), old, targets, hessian)
        new = _round_scale(new, old, self.scheme)
        values = (groups * (new / old).unsqueeze(-1)).flatten(1)
        errors = targets.sub_(values)
        losses = (errors @ hessian).mul_(errors).sum(1).view(count, -1)  # (multiples, rows)
        best = losses.argmin(0) * len(rows) + torch.arange(len(rows), device=old.device)
        self.scales.values[chosen] = new[best]
        self.scales.are_fitted = True
        return values[best]


def _spread(scales: torch.Tensor, factors: Factors) -> Factors:
    """Return factors of every value, (columns, rows), with other scales, (rows, groups)."""
    width = len(factors.scale) // scales.shape[1]
    scale = scales.T.repeat_interleave(width, 0).contiguous()
    return Factors(scale, scale.reciprocal(), factors.zero_point)


def _refit_(
    layer: FakeQuantizedLayer, rounded: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Replace the scales of a layer by the best ones for rounded values.

    Returns:
        The values of the same codes under the new scales, (outputs, inputs).
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None and quantizer.scale is not None
    old, scheme = quantizer.scale, quantizer.scheme
    by_row = _scales_by_row(layer)
    scales = by_row.reshape(len(weight), -1).float()
    groups = rounded.reshape(*scales.shape, -1)
    least = _stored_minima(scales, quantizer.zero_point, scheme, by_row is old)
    if least is not None:  # values are products above the minima, which stay
        groups = groups + least
        weight = (weight.view_as(groups) + least).flatten(1)
    new = _best_by_group((groups / scales.unsqueeze(-1)).flatten(1), scales, weight, hessian)
    new = _round_scale(new, scales, scheme)
    values = groups * (new / scales).unsqueeze(-1)
    if least is not None:
        values -= least
        zeros = (least.squeeze(-1) / new).reshape(by_row.shape)
        quantizer.zero_point = zeros if by_row is old else zeros.T.contiguous()
    return _write_scales_(layer, values.flatten(1), new)


def _scales_by_row(layer: FakeQuantizedLayer) -> torch.Tensor:
    """Return the scales of a weight with outputs along the first axis."""
    assert layer.weight_quantizer is not None and layer.weight_quantizer.scale is not None
    scale = layer.weight_quantizer.scale
    return scale if layer.input_axis or scale.dim() < 2 else scale.T


def _round_scale(new: torch.Tensor, old: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return scales in their stored format as float32, with the signs of the old ones if any."""
    return round_scale(new, scheme.scale, signs=old if scheme.signed_scales else None).float()


def _write_scales_(
    layer: FakeQuantizedLayer, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Replace the scales of a layer, (outputs, groups), and return its values under them exactly.

    Args:
        layer: The layer.
        values: Codes times scales, up to rounding errors, (outputs, inputs).
        scales: The scales.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None and quantizer.scale is not None
    by_row = _scales_by_row(layer)
    new = scales.reshape(by_row.shape).to(by_row.dtype)
    quantizer.scale = new if by_row is quantizer.scale else new.T.contiguous()
    # `values` are off by a rounding error; quantizing them gives codes times scales exactly.
    state = QuantizedTensor.from_values(
        quantizer.spec, layer.from_matrix(values), quantizer.scale, quantizer.zero_point
    )
    return layer.to_matrix(state.value(torch.float32))


def _stored_minima(
    scales: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme, is_by_row: bool
) -> torch.Tensor | None:
    """Return minima that are stored apart from scales, (outputs, groups, 1); None if none are.

    Args:
        scales: (outputs, groups) float32.
        zero_point: Zero points of the layer.
        scheme: How its weight is quantized.
        is_by_row: Whether the first axis of the zero points is that of the outputs.
    """
    if scheme.symmetric or zero_point is None or scheme.scale.fmt is None or not scheme.scale.span:
        return None
    by_row = zero_point if is_by_row else zero_point.T
    return minima(scales, by_row.reshape_as(scales), scheme.scale.fmt).unsqueeze(-1)


def _best_by_group(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Return ``best_scales`` of the rows that meet each group of inputs, (outputs, groups)."""
    hessians = hessian.view(-1, *hessian.shape[-2:])
    parts = zip(*(x.chunk(len(hessians)) for x in (codes, scales, weight)), hessians, strict=True)
    return join_rows([best_scales(*part) for part in parts])


def can_refit(layer: FakeQuantizedLayer, weight: torch.Tensor) -> bool:
    """Whether scales may take any value, and each belongs to one row or a part of one.

    Args:
        layer: A layer with a quantized weight.
        weight: Its matrix, (outputs, inputs).
    """
    assert layer.weight_quantizer is not None
    scheme = layer.weight_quantizer.scheme
    scale = scheme.scale
    has_any_value = scale.fmt is None or scale.span > 0  # as good as any in super-blocks
    is_free = not scheme.shares_exponents and not scale.power_of_two and has_any_value
    is_divisible = weight.shape[1] % group_width(scheme, weight.shape[1]) == 0
    return scheme.fmt.scaled and is_free and has_scales_per_row(layer) and is_divisible
