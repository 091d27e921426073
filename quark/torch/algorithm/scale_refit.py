"""Scales refitted to rounded values.

The squared error of the outputs of a row w is quadratic in the scales s of its groups once the
codes q are fixed, so the best scales solve A s = b with A_gh = q_gᵀ H_gh q_h and
b_g = q_gᵀ (H w)_g, where H is the mean of x xᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quark.torch.algorithm.layers import group_width, has_scales_per_row, to_matrix
from quark.torch.numerics.qdq import ColumnRounding
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor, TensorQuantizer

MAX_CHANGE = 2.0  # factor by which a scale may grow or shrink
CHUNK = 1 << 22  # elements of the matrices A, and of the rows, that are worked on at a time

Attempt = Callable[[ColumnRounding], torch.Tensor]  # rounds a weight, (outputs, inputs)


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
    blocks = hessian.view(groups, -1, len(hessian))  # (groups, width, inputs)
    result = scales.clone()
    step = max(1, CHUNK // max(groups**2, len(hessian)))
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        q = codes[rows].view(-1, groups, blocks.shape[1])  # (rows, groups, width)
        b = (q * (weight[rows] @ hessian).view_as(q)).sum(-1)  # (rows, groups)
        # (rows, groups, groups), one row of A per step: q_g H_g has an entry per input, and its
        # product with q summed over the width of each group h is A_gh.
        a = torch.stack([((q[:, g] @ blocks[g]).view_as(q) * q).sum(-1) for g in range(groups)], 1)
        unused = a.diagonal(dim1=1, dim2=2) <= 0
        a.diagonal(dim1=1, dim2=2).add_(unused)
        best, failed = torch.linalg.solve_ex(a, torch.where(unused, scales[rows], b))
        change = best / scales[rows]
        accepted = ((change > 1 / MAX_CHANGE) & (change < MAX_CHANGE)).all(1) & (failed == 0)
        result[rows] = torch.where(accepted.unsqueeze(1), best, scales[rows])
    return result


def round_and_refit(
    layer: FakeQuantizedLayer,
    weight: torch.Tensor,
    hessian: torch.Tensor,
    attempts: Sequence[Attempt],
) -> torch.Tensor:
    """Round a weight repeatedly and refit the scales to the codes after each time.

    Scales that are powers of two or fp8 numbers, or that several rows share, are not refitted;
    then only the last attempt runs.

    Args:
        layer: A layer with final scales, which are replaced by the refitted ones.
        weight: (outputs, inputs) float32.
        hessian: (inputs, inputs), positive definite.
        attempts: Functions that round the weight, in order.

    Returns:
        The result of the last attempt, under the refitted scales.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    axis = layer.input_axis
    refits = not quantizer.spec.quantizes_codes and can_refit(quantizer.scheme, weight, axis)
    rounded = weight
    for attempt in attempts if refits else attempts[-1:]:
        rounded = attempt(quantizer.column_rounder(tuple(layer.weight.shape), axis))
        if refits:
            rounded = _refit_(quantizer, rounded, weight, hessian, axis)
    return rounded


def _refit_(
    quantizer: TensorQuantizer,
    rounded: torch.Tensor,
    weight: torch.Tensor,
    hessian: torch.Tensor,
    axis: int,
) -> torch.Tensor:
    """Replace the scales of a quantizer by the best ones for rounded values.

    Returns:
        The values of the same codes under the new scales, (outputs, inputs).
    """
    old, scheme = quantizer.scale, quantizer.scheme
    assert old is not None
    by_row = old if axis or old.dim() < 2 else old.T
    scales = by_row.reshape(len(weight), -1).float()
    groups = rounded.reshape(*scales.shape, -1)
    new = best_scales((groups / scales.unsqueeze(-1)).flatten(1), scales, weight, hessian)
    new = round_scale(new, scheme.scale)
    values = (groups * (new.float() / scales).unsqueeze(-1)).flatten(1)
    new = new.reshape(by_row.shape)
    quantizer.scale = new if by_row is old else new.T.contiguous()
    # `values` are off by a rounding error; quantizing them gives codes times scales exactly.
    values = values if axis else values.T
    state = QuantizedTensor.from_values(
        quantizer.spec, values, quantizer.scale, quantizer.zero_point
    )
    return to_matrix(state.value(torch.float32), axis)


def can_refit(scheme: Scheme, weight: torch.Tensor, axis: int) -> bool:
    """Whether scales may take any value, and each belongs to one row or a part of one.

    Args:
        scheme: How the weight is quantized.
        weight: (outputs, inputs).
        axis: Axis of the inputs in the layer.
    """
    scale = scheme.scale
    is_free = not scheme.shares_exponents and not scale.power_of_two and scale.fmt is None
    is_divisible = weight.shape[1] % group_width(scheme, weight.shape[1]) == 0
    return scheme.fmt.scaled and is_free and has_scales_per_row(scheme, axis) and is_divisible
