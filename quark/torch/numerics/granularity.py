"""Granularity: which elements of a tensor share one scale, as a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F


class QSchemeType(Enum):
    """Documented names of granularities."""

    per_tensor = "per_tensor"
    per_channel = "per_channel"
    per_group = "per_group"
    per_block = "per_block"


def block_shape(
    shape: tuple[int, ...],
    qscheme: QSchemeType,
    axis: int,
    group: int,
    per_token: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[int, ...]:
    """Return the shape of the block of elements which share a scale.

    Worked example, a weight of shape (out, in) = (8, 64): per tensor (8, 64); per channel along
    axis 0 (1, 64); per group of 32 along axis -1 (1, 32).

    Args:
        shape: Shape of the tensor.
        qscheme: Granularity.
        axis: Channel axis, or the axis that is cut in groups.
        group: Elements of a group; -1 takes the whole axis.
        per_token: Every position along all axes but the last has a scale of its own.
        block: Rows and columns of a block per block, along the last two axes; -1 for all.

    Raises:
        ValueError: ``axis`` is not an axis of the tensor, or it has too few for ``block``.
    """
    if per_token:
        return (1,) * (len(shape) - 1) + shape[-1:]
    if qscheme is QSchemeType.per_tensor:
        return shape
    if qscheme is QSchemeType.per_block:
        if block is None or len(shape) < 2:
            raise ValueError(f"per_block needs two axes and block_size, got {shape} and {block}.")
        sides = [n if b == -1 else b for n, b in zip(shape[-2:], block, strict=True)]
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


@dataclass(frozen=True)
class Blocks:
    """A view of a tensor in which whole axes are reduced to get one number per block.

    Attributes:
        shape: Shape of the tensor.
        padded: Shape after zero padding to whole blocks; equal to ``shape`` if nothing is ragged.
        view: Shape of the view. Neighbouring axes of one kind are merged, so its rank is minimal.
        reduced: Axes of the view which run inside a block.
        grid: Number of blocks along each axis of the tensor: the natural shape of the scales.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    view: tuple[int, ...]
    reduced: tuple[int, ...]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], block: tuple[int, ...]) -> Blocks:
        """Lay blocks of shape ``block`` over a tensor of shape ``shape``."""
        grid = tuple(-(-n // b) if b else 0 for n, b in zip(shape, block, strict=True))
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
        """View ``x`` in blocks, zero-padding ragged ones. Zeros never widen a range that has 0."""
        x = x.reshape(self.shape)
        if self.padded != self.shape:
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
        """View one number per block, of any shape, so that it broadcasts over ``view``.

        Raises:
            ValueError: The count differs from the number of blocks.
        """
        if scale.numel() != math.prod(self.grid):
            raise ValueError(
                f"A tensor of shape {self.shape} has {math.prod(self.grid)} blocks "
                f"(a grid of {self.grid}), but a scale or zero point of shape "
                f"{tuple(scale.shape)} was given."
            )
        return scale.reshape(self.scale_view)


def row_pieces(x: torch.Tensor, elements: int) -> list[torch.Tensor]:
    """Cut along the first axis in pieces of about so many elements, which stay in a CPU's cache.

    A small tensor, or one on another device, is one piece.
    """
    if x.device.type != "cpu" or x.numel() <= elements:
        return [x]
    return list(torch.split(x, max(1, elements * x.shape[0] // x.numel())))


def join_rows(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Undo ``row_pieces``."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
