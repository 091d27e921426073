"""Ranges of runs of elements, by kernels."""

from __future__ import annotations

import torch

from quark.torch.numerics.native.compilation import can_run, run_rows
from quark.torch.numerics.native.kernels import find_extremes_16, find_extremes_32

# Type -> kernel, and the bits of infinity for kernels of several types.
_KERNELS = {
    torch.bfloat16: (find_extremes_16, (0x7F80,)),
    torch.float16: (find_extremes_16, (0x7C00,)),
    torch.float32: (find_extremes_32, ()),
}


def find_extremes(
    view: torch.Tensor, reduced: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the smallest and the largest values along axes, in the type of a tensor.

    Args:
        view: The tensor.
        reduced: The axes, in order.

    Returns:
        Both in the shape without these axes, NaN where there is one; None if no kernel serves.
    """
    if view.dtype not in _KERNELS or not view.is_contiguous() or not can_run(view):
        return None
    # Runs begin at the axis ``inside``: all axes from there on are reduced.
    inside = next((i for i in range(view.dim(), 0, -1) if i - 1 not in reduced), 0)
    if inside == view.dim():
        return None  # neighboring elements belong to different blocks
    shape = view.shape[:inside]
    runs = view.detach().reshape(shape.numel(), -1)
    kernel, constants = _KERNELS[view.dtype]
    bits = torch.int32 if view.dtype == torch.float32 else torch.int16
    lo, hi = torch.empty(2, len(runs), dtype=bits)
    run_rows(kernel, [runs.view(bits), lo, hi], *constants)
    lo, hi = (end.view(view.dtype).view(shape) for end in (lo, hi))
    outer = [axis for axis in reduced if axis < inside]
    return (lo.amin(outer), hi.amax(outer)) if outer else (lo, hi)
