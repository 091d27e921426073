"""From the range of values to scale and zero point."""

from __future__ import annotations

from enum import Enum

import torch

from quark.torch.numerics.scheme import Scheme

# Smallest scale of an integer format, 2^-23: representable in float16, and the value that
# checkpoints in this format carry for all-zero tensors.
EPS = torch.finfo(torch.float32).eps


class ScaleType(Enum):
    """Type in which scales are stored. ``float`` is float32."""

    float = "float"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch type of the scales."""
        return torch.float32 if self is ScaleType.float else getattr(torch, self.value)


class ZeroPointType(Enum):
    """Whether zero points are integers or keep their fraction."""

    int32 = "int32"
    float32 = "float32"


def block_range(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest value of each block in float32.

    Both have ``scheme.scale_shape(x.shape)``. NaN propagates.
    """
    blocks = scheme.blocks(x.shape)
    shape = scheme.scale_shape(x.shape)
    view = blocks.split(x)
    lo, hi = view.amin(blocks.reduced), view.amax(blocks.reduced)
    return lo.float().reshape(shape), hi.float().reshape(shape)


def qparams_from_range(
    lo: torch.Tensor, hi: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Solve for scale and zero point of values in [lo, hi], widened to include zero.

    Symmetric integers: amax / ((qmax - qmin) / 2), zero point in the middle of the codes.
    Asymmetric: (hi - lo) / (qmax - qmin), zero point qmin - lo / scale, rounded unless
    ``scheme.float_zero_point``. Floats: amax / largest value, no zero point.

    Args:
        lo: Smallest values, float32.
        hi: Largest values, same shape.
        scheme: How the tensor is quantized.

    Returns:
        The scale in ``scheme.scale_dtype`` and the zero point (int32, float32, or None), in the
        shape of ``lo``.
    """
    fmt = scheme.fmt
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    amax = torch.maximum(-lo, hi)
    if fmt.is_float:
        return _store(torch.where(amax == 0, EPS, _divided(amax, fmt.max_value)), scheme), None
    steps = fmt.qmax - fmt.qmin
    scale = _divided(amax, steps / 2) if scheme.symmetric else _divided(hi - lo, steps)
    scale = _store(scale.clamp(min=EPS), scheme)
    if scheme.symmetric:
        middle = (fmt.qmin + fmt.qmax + 1) // 2
        return scale, torch.full_like(scale, middle, dtype=torch.int32)
    if scheme.float_zero_point:
        return scale, fmt.qmin - lo / scale.float()
    zero_point = fmt.qmin - (lo / scale.float()).round()
    return scale, zero_point.clamp(fmt.qmin, fmt.qmax).to(torch.int32)


def _divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """Divide by a number, rounding once: a GPU would multiply by the reciprocal of a scalar."""
    return x / torch.full_like(x, by)


def _store(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Round scales to the type they are stored in; none may become zero or infinite."""
    limits = torch.finfo(scheme.scale_dtype)
    # float16 keeps subnormals down to 2^-24; elsewhere a subnormal has no finite reciprocal.
    smallest = limits.smallest_normal if limits.bits > 16 or limits.max > 1e5 else EPS
    return scale.clamp(smallest, limits.max).to(scheme.scale_dtype)
