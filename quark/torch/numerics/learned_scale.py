"""Fake quantization with a gradient for its scale, so that scales can be trained."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch.numerics.qdq import fake_quantize, without_view
from quark.torch.numerics.scheme import Scheme


def fake_quantize_learned(
    x: torch.Tensor,
    parameter: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
    slope: torch.Tensor | float,
) -> torch.Tensor:
    """Return ``fake_quantize`` of a tensor, under a scale that is a function of a parameter.

    The gradient of ``x`` is that of the result between the smallest and the largest code, and zero
    beyond. The gradient of the parameter follows ``scale_slope``.

    Args:
        x: Values.
        parameter: What is trained, float32, in the shape of ``scale``.
        scale: Scale under this parameter, one per block.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.
        slope: Derivative of the scale by the parameter, times any factor for its gradient.
    """
    result: torch.Tensor = _LearnedScale.apply(x, parameter, scale, zero_point, scheme, slope)  # type: ignore[no-untyped-call]
    return result


def scale_slope(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the derivatives of fake-quantized values by their scale and by the values.

    Rounding counts as a constant offset. Let q be the value of the code of x under a scale of 1.
    Then q * s has the derivative q - x / s by the scale s between the smallest and the largest
    code, and q beyond (Esser et al. 2020, equation 3). Example, int4 with s = 1: x = 2.75 has q = 3
    and the derivative 0.25; x = 9 has q = 7 and the derivative 7.

    Args:
        x: Values.
        scale: One per block, any shape.
        zero_point: Like ``scale``, or None.
        scheme: How the tensor is quantized.

    Returns:
        The derivative by the scale, float32, and whether the derivative by ``x`` is 1, bool; both
        in the shape of ``x``.
    """
    blocks = scheme.blocks(x.shape)
    view, by = blocks.split(x).float(), blocks.spread(scale.float())
    ratio = view / by if scheme.divides else view * by.reciprocal()  # as fake_quantize computes it
    lo, hi = _extreme_codes(zero_point, scheme)
    if isinstance(lo, torch.Tensor):
        lo, hi = blocks.spread(lo), blocks.spread(hi)
    inside = blocks.join((ratio >= lo) & (ratio <= hi)).reshape(x.shape)
    ratio = blocks.join(ratio).reshape(x.shape)
    unit = torch.ones_like(scale, dtype=torch.float32)
    rounded = fake_quantize(ratio, unit, zero_point, scheme)
    return rounded - ratio * inside, inside


def gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of values, and of their scales in float32, given that of the result."""
    by_scale, inside = scale_slope(x, scale, zero_point, scheme)
    blocks = scheme.blocks(x.shape)
    sums = blocks.split(by_scale.mul_(grad)).sum(blocks.reduced)
    return grad * inside, sums.reshape(scale.shape)


def _extreme_codes(zero_point: torch.Tensor | None, scheme: Scheme) -> tuple[Any, Any]:
    """Return the values of the smallest and the largest code under a scale of 1."""
    fmt = scheme.fmt
    if fmt.is_float:
        return (-fmt.max_value if fmt.signed else 0.0), fmt.max_value
    if zero_point is None or (scheme.symmetric and fmt.signed):
        return fmt.qmin, fmt.qmax
    return fmt.qmin - zero_point.float(), fmt.qmax - zero_point.float()


class _LearnedScale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        parameter: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        scheme: Scheme,
        slope: torch.Tensor | float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.scheme, ctx.slope = scheme, slope
        return without_view(fake_quantize(x, scale, zero_point, scheme))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        by_x, by_scale = gradients(grads[0], x, scale, zero_point, ctx.scheme)
        return by_x, by_scale * ctx.slope, None, None, None, None
