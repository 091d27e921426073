"""Ranges of blocks, by kernels."""

from __future__ import annotations

import torch

from quark.torch.numerics.native import range_kernels
from quark.torch.numerics.native.compilation import can_run, run_rows
from quark.torch.numerics.native.runs import count_outer_axes, split_runs

_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}  # its bits


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
    outer = count_outer_axes(view.shape, reduced)
    if (
        outer is None
        or view.dtype not in _INFINITY
        or not view.is_contiguous()
        or not can_run(view)
    ):
        return None
    bits = torch.int32 if view.dtype == torch.float32 else torch.int16
    runs = split_runs(view.detach(), outer)
    lo, hi = torch.empty(2, len(runs), dtype=bits, device="cpu")
    run_rows(range_kernels.find_extremes, [runs.view(bits), lo, hi], _INFINITY[view.dtype])
    lo, hi = lo.view(view.dtype), hi.view(view.dtype)
    shape = view.shape[:outer]
    if shape.numel() < len(runs):  # parts of a single run
        lo, hi = lo.amin(), hi.amax()
    lo, hi = lo.view(shape), hi.view(shape)
    others = [axis for axis in reduced if axis < outer]
    return (lo.amin(others), hi.amax(others)) if others else (lo, hi)


def find_largest(codes: torch.Tensor, mask: int) -> int | None:
    """Return the largest of some codes of one byte, of the bits in a mask; None without a kernel.

    Args:
        codes: uint8, not empty.
        mask: Bits that count.
    """
    if not codes.is_contiguous() or not can_run(codes):
        return None
    runs = split_runs(codes, 0)
    out = torch.empty(len(runs), dtype=torch.uint8, device="cpu")
    run_rows(range_kernels.find_largest_code, [runs, out], mask)
    return int(out.max())
