"""Scales that serve chosen codes best.

The squared error of the outputs of a row w is quadratic in the scales of its groups, once its codes
q are chosen: A s = b with A_gh = q_gᵀ H_gh q_h and b_g = q_gᵀ (H w)_g, for H the mean of x xᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quark.torch.algorithm.clipping import group_width, rows_apart
from quark.torch.algorithm.rescaling import as_rows
from quark.torch.numerics.qdq import ColumnRounding
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed
from quark.torch.quantization.nn.quantizer import State, TensorQuantizer

MOST = 2.0  # factor by which a scale may change
PIECE = 1 << 24  # elements of the matrices A that are solved for at a time

Attempt = Callable[[ColumnRounding], torch.Tensor]  # rounds a weight, (outputs, inputs)


@torch.no_grad()
def fitted_scales(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Return the scales of least squared error of outputs, (outputs, groups).

    A row keeps its own where one of the best were negative or more than ``MOST`` times another
    size, a group whose codes are all zero likewise.

    Args:
        codes: (outputs, inputs) float32, zero points subtracted.
        scales: (outputs, groups) float32: those under which codes were chosen.
        weight: (outputs, inputs) float32: what the product of both is to come close to.
        hessian: (inputs, inputs), positive definite.
    """
    outputs, groups = scales.shape
    blocks = hessian.view(groups, -1, len(hessian))
    found = scales.clone()
    step = max(1, PIECE // groups**2)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        q = codes[rows].view(-1, groups, blocks.shape[1])
        b = (q * (weight[rows] @ hessian).view_as(q)).sum(-1)
        a = torch.stack([((q[:, g] @ blocks[g]).view_as(q) * q).sum(-1) for g in range(groups)], 1)
        unused = a.diagonal(dim1=1, dim2=2) <= 0
        a.diagonal(dim1=1, dim2=2).add_(unused)
        best, failed = torch.linalg.solve_ex(a, torch.where(unused, scales[rows], b))
        change = best / scales[rows]
        fits = ((change > 1 / MOST) & (change < MOST)).all(1) & (failed == 0)
        found[rows] = torch.where(fits.unsqueeze(1), best, scales[rows])
    return found


def round_and_fit(
    layer: QuantMixin, weight: torch.Tensor, hessian: torch.Tensor, attempts: Sequence[Attempt]
) -> torch.Tensor:
    """Round a weight again and again, with scales fitted to the codes each time.

    Where scales are powers of two or fp8 numbers, or serve several rows, they stay as they are and
    only the last attempt counts.

    Args:
        layer: A layer whose scales are settled; it gets the fitted ones.
        weight: (outputs, inputs) float32.
        hessian: (inputs, inputs), positive definite.
        attempts: What rounds the weight, in turn.

    Returns:
        The weight as the last attempt rounded it, under fitted scales.
    """
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    axis = 0 if is_transposed(layer.float_class) else 1
    fits = not quantizer.spec.quantizes_codes and fittable(quantizer.scheme, weight, axis)
    rounded = weight
    for attempt in attempts if fits else attempts[-1:]:
        rounded = attempt(quantizer.column_rounder(tuple(layer.weight.shape), axis))
        if fits:
            rounded = _fit(quantizer, rounded, weight, hessian, axis)
    return rounded


def _fit(
    quantizer: TensorQuantizer,
    rounded: torch.Tensor,
    weight: torch.Tensor,
    hessian: torch.Tensor,
    axis: int,
) -> torch.Tensor:
    """Give a quantizer the scales that serve rounded values best, and return these under them."""
    held, scheme = quantizer.scale, quantizer.scheme
    assert held is not None
    turned = held if axis or held.dim() < 2 else held.T
    scales = turned.reshape(len(weight), -1).float()
    parts = rounded.reshape(*scales.shape, -1)
    found = fitted_scales((parts / scales.unsqueeze(-1)).flatten(1), scales, weight, hessian)
    found = round_scale(found, scheme.scale)
    near = (parts * (found.float() / scales).unsqueeze(-1)).flatten(1)
    found = found.reshape(turned.shape)
    quantizer.scale = found if turned is held else found.T.contiguous()
    # Codes times scales, to the bit.
    near = near if axis else near.T
    state = State.of_values(quantizer.spec, near, quantizer.scale, quantizer.zero_point)
    return as_rows(state.value(torch.float32), axis)


def fittable(scheme: Scheme, weight: torch.Tensor, axis: int) -> bool:
    """Whether scales may take any value, and each serves a row or a part of it.

    Args:
        scheme: How the weight is quantized.
        weight: (outputs, inputs).
        axis: Axis of the inputs in the layer.
    """
    to = scheme.scale
    free = not scheme.shares_exponents and not to.power_of_two and to.fmt is None
    width = group_width(scheme, weight.shape[1])
    return scheme.fmt.scaled and free and rows_apart(scheme, axis) and weight.shape[1] % width == 0
