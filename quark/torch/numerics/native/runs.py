"""Runs: neighboring elements that share a scale, as rows of a matrix that kernels process."""

from __future__ import annotations

import math

import torch

from quark.torch.numerics.granularity import Blocks

SHORTEST = 8  # elements of a run that kernels process: for less, operations of torch are faster
_PARTS = 64  # of a run that is a whole tensor, so that threads divide it


def count_outer_axes(shape: tuple[int, ...], reduced: tuple[int, ...]) -> int | None:
    """Return the number of axes of a view before its runs, None if these are too short.

    Example: blocks of 16 x 32 in the view (3, 16, 4, 32), reduced along the axes 1 and 3. A run is
    a row of a block, so 3 axes lie before it.
    """
    outer = next((axis for axis in range(len(shape), 0, -1) if axis - 1 not in reduced), 0)
    return outer if math.prod(shape[outer:]) >= SHORTEST else None


def split_runs(x: torch.Tensor, outer: int) -> torch.Tensor:
    """View a contiguous tensor as a matrix whose rows are its runs, or equal parts of a single run.

    Args:
        x: The tensor.
        outer: Axes before its runs.
    """
    runs = x.shape[:outer].numel()
    if runs == 1:
        runs = min(_PARTS, x.numel() & -x.numel())  # a power of two that divides the length
    return x.view(runs, -1)


def spread_over_runs(x: torch.Tensor, blocks: Blocks, outer: int, rows: int) -> torch.Tensor:
    """Return a number for each row of ``split_runs``, float32, given one for each block.

    Args:
        x: Numbers of blocks.
        blocks: The blocks.
        outer: Axes before runs.
        rows: Number of rows.
    """
    numbers = blocks.spread(x.float()).reshape(blocks.scale_view[:outer])
    numbers = numbers.expand(blocks.view[:outer]).reshape(-1)
    return numbers.expand(rows).contiguous() if len(numbers) == 1 else numbers.contiguous()
