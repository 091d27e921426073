"""How one tensor is quantized, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import Blocks, QSchemeType, block_shape
from quark.torch.numerics.rounding import RoundType
from quark.torch.numerics.scale_formats import E8M0, FLOAT32, ScaleFormat


@dataclass(frozen=True)
class Scheme:
    """Format, granularity, symmetry and scale of a quantized tensor.

    Attributes:
        fmt: Number format of the elements.
        qscheme: Granularity.
        axis: Channel axis or grouped axis.
        group: Elements of a group, -1 for the whole axis.
        symmetric: Whether the range is centred on zero.
        rounding: How values between two codes are decided.
        block: Rows and columns of a two-dimensional block, where ``qscheme`` is per block.
        scale: Format of the scales. They are rounded to it before they are used.
        scale_mode: How the exponent of a power-of-two scale is rounded.
        float_zero_point: Whether zero points keep their fraction.
        per_token: One scale per position along all axes but the last.
        flat: Whether groups and blocks run over all axes but the first as if they were one, as in
            the weight of a convolution.
    """

    fmt: Format
    qscheme: QSchemeType = QSchemeType.per_tensor
    axis: int = 0
    group: int = -1
    symmetric: bool = True
    rounding: RoundType = RoundType.half_even
    block: tuple[int, int] | None = None
    scale: ScaleFormat = FLOAT32
    scale_mode: str = "even"
    float_zero_point: bool = False
    per_token: bool = False
    flat: bool = False

    @property
    def has_zero_point(self) -> bool:
        """Whether codes are offset: all integers, which store a zero even when symmetric."""
        return not self.fmt.is_float and not self.shares_exponents

    @property
    def shares_exponents(self) -> bool:
        """Whether blocks share exponents, which are found from the bits of their values."""
        return self.fmt.block > 0 or self.scale == E8M0

    @property
    def scales_by_powers(self) -> bool:
        """Whether every scale is a power of two."""
        return self.fmt.block > 0 or self.scale.power_of_two

    @property
    def divides(self) -> bool:
        """Whether values are divided by scales, and not multiplied by their reciprocals."""
        return self.fmt.is_float or self.scales_by_powers

    def blocks(self, shape: torch.Size | tuple[int, ...]) -> Blocks:
        """Lay the blocks of this granularity over a tensor of shape ``shape``."""
        return _blocks(self, tuple(shape))

    def scale_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of shape ``shape``.

        [] per tensor, [channels] per channel, the grid of blocks otherwise.
        """
        if self.per_token or self.qscheme in GROUPED:
            return self.blocks(shape).grid
        if self.qscheme is QSchemeType.per_channel:
            return (tuple(shape)[self.axis],)
        return ()


GROUPED = (QSchemeType.per_group, QSchemeType.per_block)


@lru_cache(maxsize=1024)
def _blocks(scheme: Scheme, shape: tuple[int, ...]) -> Blocks:
    if scheme.flat and scheme.qscheme in GROUPED and len(shape) > 2:
        shape = (shape[0], math.prod(shape[1:]))
    group = scheme.fmt.sub_block or scheme.group
    block = block_shape(shape, scheme.qscheme, scheme.axis, group, scheme.per_token, scheme.block)
    return Blocks.of(shape, block)
