"""Granularity as shapes: the blocks of elements that share a scale, and the shape of the scales.

``block_shape`` decides which elements share a scale, ``scale_shape`` the shape of the scales.
Padding to whole blocks is decided by ``Blocks`` and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class QSchemeType(Enum):
    """Granularities by their documented names; ``per_head`` is one scale for some channels."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"
    per_head = "per_head"


GROUPED = (QSchemeType.per_group, QSchemeType.per_block)


def block_shape(
    shape: tuple[int, ...],
    qscheme: QSchemeType,
    axis: int,
    group: int,
    per_token: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[int, ...]:
    """Return the shape of the block of elements that share a scale.

    Example, a weight of shape (out, in) = (8, 64): per tensor (8, 64); per channel along axis 0
    (1, 64); per group of 32 along axis -1 (1, 32); per block of 4 x 16 (4, 16); per head of 16
    (8, 16).

    Args:
        shape: Shape of the tensor.
        qscheme: Granularity.
        axis: Channel axis, or the axis that groups divide.
        group: Group size; -1 for the whole axis. Channels of a head.
        per_token: Whether each position along all axes but the last has its own scale.
        block: Rows and columns of a two-dimensional block, along the last two axes. -1, or more
            than there are, stands for all.

    Raises:
        ValueError: ``axis`` is not an axis of the tensor, or the tensor has too few axes for
            ``block``.
    """
    if per_token:
        return (1,) * (len(shape) - 1) + shape[-1:]
    if qscheme is QSchemeType.per_tensor:
        return shape
    if qscheme is QSchemeType.per_head:
        return (*shape[:-1], shape[-1] if group == -1 else group)
    if qscheme is QSchemeType.per_block:
        if block is None or len(shape) < 2:
            raise ValueError(f"per_block needs two axes and block_size, got {shape} and {block}.")
        sides = [
            n if b == -1 else min(max(n, 1), b) for n, b in zip(shape[-2:], block, strict=True)
        ]
        return (1,) * (len(shape) - 2) + tuple(sides)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"ch_axis={axis} is not an axis of a tensor of shape {shape}: "
            f"give one from {-len(shape)} to {len(shape) - 1}."
        )
    axis %= len(shape)
    if qscheme is QSchemeType.per_channel:
        return tuple(1 if i == axis else n for i, n in enumerate(shape))
    size = shape[axis] if group == -1 else group
    return tuple(size if i == axis else 1 for i, n in enumerate(shape))


def scale_shape(
    shape: tuple[int, ...], qscheme: QSchemeType, axis: int, grid: tuple[int, ...], per_token: bool
) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor.

    It is [] per tensor, [channels] per channel, [heads] per head, and the grid of blocks otherwise.
    Example, a weight of shape (8, 64): per group of 32 along axis -1, the scales have the shape
    (8, 2).

    Args:
        shape: Shape of the tensor.
        qscheme: Granularity.
        axis: Channel axis.
        grid: ``Blocks.grid`` of the tensor.
        per_token: As in ``block_shape``.
    """
    if per_token or qscheme in GROUPED:
        return grid
    if qscheme is QSchemeType.per_head:
        return grid[-1:]
    return (shape[axis],) if qscheme is QSchemeType.per_channel else ()


@dataclass(frozen=True)
class Blocks:
    """A view of a tensor whose ``reduced`` axes run inside a block.

    Reducing these axes gives one number per block. Example: blocks of (2, 3) over a tensor of
    (4, 6) give the view (2, 2, 2, 3) with the reduced axes (1, 3): element (i, j) of the tensor is
    element (i // 2, i % 2, j // 3, j % 3) of the view. Rows of 100 in groups of 32 are padded to
    128: the last group holds 4 values and 28 zeros.

    Attributes:
        shape: Shape of the tensor.
        padded: Shape after zero padding to whole blocks; equal to ``shape`` if blocks divide it.
        view: Shape of the view. Adjacent axes of one kind are merged, so its rank is minimal.
        reduced: Axes of the view that run inside a block.
        grid: Number of blocks along each axis of the tensor.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    view: tuple[int, ...]
    reduced: tuple[int, ...]
    grid: tuple[int, ...]

    @classmethod
    def cover(cls, shape: tuple[int, ...], block: tuple[int, ...]) -> Blocks:
        """Cover a tensor of shape ``shape`` with blocks of shape ``block``."""
        grid = tuple(-(-n // b) if b else 0 for n, b in zip(shape, block, strict=True))
        # Each axis of the tensor is (blocks, size of a block). Axes of length 1 are left out, and
        # adjacent axes of one kind are merged: (8, 64) in rows is (8, 1, 1, 64), then (8, 64).
        axes: list[tuple[int, bool]] = []  # (size, runs inside a block)
        for count, size in zip(grid, block, strict=True):
            for length, inside in ((count, False), (size, True)):
                if length == 1:
                    continue
                if axes and axes[-1][1] == inside:
                    axes[-1] = (axes[-1][0] * length, inside)
                else:
                    axes.append((length, inside))
        if not any(inside for _, inside in axes):
            axes.append((1, True))  # blocks of one element
        return cls(
            shape=shape,
            padded=tuple(c * b for c, b in zip(grid, block, strict=True)),
            view=tuple(length for length, _ in axes),
            reduced=tuple(i for i, (_, inside) in enumerate(axes) if inside),
            grid=grid,
        )

    @property
    def scale_view(self) -> tuple[int, ...]:
        """Shape in which scales broadcast over ``view``."""
        return tuple(1 if i in self.reduced else n for i, n in enumerate(self.view))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """View ``x`` in blocks. Padding with zeros does not widen a range that includes 0."""
        x = x.reshape(self.shape)
        if self.padded != self.shape:
            from torch.nn import functional as F

            widths = [p - n for n, p in zip(self.shape, self.padded, strict=True)]
            x = F.pad(x, [side for width in reversed(widths) for side in (0, width)])
        return x.reshape(self.view)

    def join(self, view: torch.Tensor) -> torch.Tensor:
        """Undo ``split``."""
        x = view.reshape(self.padded)
        if self.padded != self.shape:
            x = x[tuple(slice(n) for n in self.shape)]
        return x

    def spread(self, scale: torch.Tensor) -> torch.Tensor:
        """View a tensor with one number per block so that it broadcasts over ``view``.

        Raises:
            ValueError: The number of elements differs from the number of blocks.
        """
        if scale.numel() != math.prod(self.grid):
            raise ValueError(
                f"A tensor of shape {self.shape} has {math.prod(self.grid)} blocks "
                f"(a grid of {self.grid}), but a scale or zero point of shape "
                f"{tuple(scale.shape)} was given."
            )
        return scale.reshape(self.scale_view)
