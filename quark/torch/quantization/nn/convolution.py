"""Convolutions as products of matrices: the weight, and the windows of the input that it meets.

A convolution multiplies each window of its input by its weight. Written as a row, a window holds
the values of all input channels at all positions of the kernel, in the order of the weight:

    Conv2d(3, 8, kernel 5) on (2, 3, 32, 32): weight (8, 75), windows (2 · 28 · 28, 75)
    the same with 3 groups, 9 outputs:        weight (9, 25), windows (3, 2 · 28 · 28, 25)

Group g of the weight, rows 3 g to 3 g + 2 here, meets the windows of group g. A transposed
convolution is a convolution of its input with zeros between the elements, by the flipped kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
TRANSPOSED = (nn.ConvTranspose2d,)
PIECE = 1 << 23  # elements of windows that are in memory at a time: 32 MiB of float32


def convolution_matrix(weight: torch.Tensor, groups: int, is_transposed: bool) -> torch.Tensor:
    """Return the weight of a convolution as a matrix, (outputs, columns).

    A column belongs to an input channel of a group and a position of the kernel.

    Args:
        weight: (outputs, channels of a group, *kernel); (inputs, outputs of a group, *kernel) if
            transposed.
        groups: Number of groups of channels.
        is_transposed: Whether the convolution is transposed.
    """
    if not is_transposed:
        return weight.flatten(1)
    parts = weight.reshape(groups, -1, *weight.shape[1:])  # (groups, inputs, outputs, *kernel)
    return parts.transpose(1, 2).flatten(2).flatten(0, 1)


def convolution_weight(
    matrix: torch.Tensor, shape: Sequence[int], groups: int, is_transposed: bool
) -> torch.Tensor:
    """Return a matrix in the shape of the weight: undo ``convolution_matrix``."""
    if not is_transposed:
        return matrix.reshape(tuple(shape))
    inputs, outputs, *kernel = shape
    parts = matrix.reshape(groups, outputs, inputs // groups, *kernel)
    return parts.transpose(1, 2).reshape(tuple(shape))


def iterate_windows(
    layer: Any, x: torch.Tensor, output_size: Sequence[int] | None = None
) -> Iterator[torch.Tensor]:
    """Iterate over the windows of an input in the order of the outputs, in pieces.

    Pieces bound the memory. They depend on nothing but the shapes.

    Args:
        layer: The convolution.
        x: Its input, (batch, channels, *positions) or (channels, *positions).
        output_size: As a transposed convolution takes it.

    Yields:
        (windows, columns); (groups, windows, columns) for several groups.
    """
    axes = len(layer.kernel_size)
    x = x.unsqueeze(0) if x.dim() == axes + 1 else x
    is_transposed = isinstance(layer, TRANSPOSED)
    padded = (_spread(layer, x, output_size) if is_transposed else _pad(layer, x)).contiguous()
    windows = _view_windows(padded, layer, (1,) * axes if is_transposed else layer.stride)
    kernel_axes = range(2 + axes, 2 + 2 * axes)
    order = (1, 0, *range(3, 3 + axes), 2, *(1 + axis for axis in kernel_axes))
    size = padded.shape[1] * math.prod(layer.kernel_size) * math.prod(windows.shape[3 : 2 + axes])
    rows = max(1, PIECE // max(1, size))  # of the first axis of positions
    images = max(1, rows // max(1, windows.shape[2]))
    for image in range(0, len(windows), images):
        for row in range(0, windows.shape[2], rows):
            piece = windows[image : image + images, :, row : row + rows]
            piece = piece.flip(tuple(kernel_axes)) if is_transposed else piece
            count, channels, *rest = piece.shape
            split = piece.view(count, layer.groups, channels // layer.groups, *rest)
            grouped = split.permute(order)
            rowwise = grouped.flatten(2 + axes).flatten(1, 1 + axes)  # (groups, windows, columns)
            yield rowwise[0] if layer.groups == 1 else rowwise


def _pad(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the input of a convolution with its padding, also that of ``"same"``."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, list(layer._reversed_padding_repeated_twice), mode=mode)


def _spread(layer: Any, x: torch.Tensor, output_size: Sequence[int] | None) -> torch.Tensor:
    """Return the input of a transposed convolution with zeros between the elements, padded."""
    axes = len(layer.kernel_size)
    more = layer._output_padding(
        x, output_size, layer.stride, layer.padding, layer.kernel_size, axes, layer.dilation
    )
    lengths = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *lengths)
    steps = tuple(slice(None, None, s) for s in layer.stride)
    spread[(slice(None), slice(None), *steps)] = x
    # Example: kernel 3, padding 0 -> 2 zeros on either side, as each element reaches 3 outputs.
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sides = [(r - p, r - p + m) for r, p, m in zip(reach, layer.padding, more, strict=True)]
    return F.pad(spread, [side for pair in reversed(sides) for side in pair])


def _view_windows(padded: torch.Tensor, layer: Any, stride: Sequence[int]) -> torch.Tensor:
    """Return a view of all windows, (batch, channels, *positions, *kernel)."""
    batch, channels, *lengths = padded.shape
    steps = padded.stride()[2:]
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    counts = [(n - r - 1) // s + 1 for n, r, s in zip(lengths, reach, stride, strict=True)]
    return padded.as_strided(
        (batch, channels, *counts, *layer.kernel_size),
        (
            *padded.stride()[:2],
            *(step * s for step, s in zip(steps, stride, strict=True)),
            *(step * d for step, d in zip(steps, layer.dilation, strict=True)),
        ),
    )
