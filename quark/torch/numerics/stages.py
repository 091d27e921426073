"""Quantization in two stages, of which the second quantizes the codes of the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quark.torch.numerics.column_rounder import Attempt, ColumnRounder, ColumnRounding
from quark.torch.numerics.qdq import dequantize, fake_quantize_, quantize
from quark.torch.numerics.scheme import Scheme


class LastStage(NamedTuple):
    """Input and scales of the stage whose codes are stored: the second of two, or the only one.

    Attributes:
        values: Input of the stage, float32: the tensor, or the codes of its first stage.
        scale: Scale of the stage.
        zero_point: Zero point of the stage, or None.
        scheme: Quantization scheme of the stage.
        tensor_scale: Tensor scale [] of two-level scales, or None.
        unit: Factor of the results: the scale of the first stage, or 1.
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme
    tensor_scale: torch.Tensor | None
    unit: torch.Tensor | float


class TwoRoundings(NamedTuple):
    """Rounds columns in two stages; see ``ColumnRounding``.

    Attributes:
        scale: Per-tensor scale of the first stage.
        first: Rounds values / scale to the codes of the first stage.
        second: Rounds these codes.
    """

    scale: torch.Tensor
    first: ColumnRounder
    second: ColumnRounder

    def __call__(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the rounded values of a column."""
        return self.second(self.first(x / self.scale, column), column).mul_(self.scale)

    def select_rows(self, rows: torch.Tensor) -> ColumnRounding:
        """Return the rounding of some rows of every column."""
        return TwoRoundings(self.scale, self.first.select_rows(rows), self.second.select_rows(rows))

    def round_rows(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        hessian: torch.Tensor,
        attempt: Attempt,
        multiples: Sequence[float] = (1.0,),
    ) -> torch.Tensor:
        """Return some rows rounded by a function once: the scales are final."""
        return attempt(target, self.select_rows(rows))


def fake_quantize_codes(
    x: torch.Tensor,
    first: Scheme,
    second: Scheme,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    scale_2: torch.Tensor | None,
    zero_point_2: torch.Tensor | None,
) -> torch.Tensor:
    """Return a tensor quantized in two stages, of which the second quantizes the codes.

    Args:
        x: Values.
        first: Scheme of the first stage.
        second: Scheme of the second stage.
        scale: Scale of the first stage.
        zero_point: Zero point of the first stage, or None.
        scale_2: Scale of the second stage.
        zero_point_2: Zero point of the second stage, or None.
    """
    if x.numel() == 0:
        return x.clone()
    assert scale is not None
    values = first_codes(x, scale, zero_point, first)
    values = fake_quantize_(values, scale_2, zero_point_2, second)
    return values.mul_(per_value(scale, first, x.shape)).to(x.dtype)


def first_codes(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Return the values of the codes of a first stage under a scale of 1, float32."""
    codes = quantize(x.detach(), scale, zero_point, scheme)
    return dequantize(codes, torch.ones_like(scale), None, scheme)


def per_value(scale: torch.Tensor, scheme: Scheme, shape: torch.Size) -> torch.Tensor:
    """Return the scales of blocks in a shape that broadcasts over the values."""
    if scale.dim() == 0:
        return scale
    blocks = scheme.blocks(shape)
    return blocks.join(blocks.spread(scale.float()).expand(blocks.view)).reshape(shape)
