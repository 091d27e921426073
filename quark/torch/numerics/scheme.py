"""``Scheme``: how a tensor is quantized, as one immutable value."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import GROUPED, Blocks, QSchemeType, block_shape, scale_shape
from quark.torch.numerics.scale_formats import E8M0, FLOAT32, ScaleFormat
from quark.torch.numerics.scheme_text import changed_fields, format_entry, read_fields

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Scheme:
    """Format, granularity, symmetry and scale of a quantized tensor.

    Attributes:
        fmt: Number format of the elements.
        qscheme: Granularity.
        axis: Channel axis or grouped axis.
        group: Group size, -1 for the whole axis.
        symmetric: Whether the range is centred on zero.
        rounding: Rounding mode of values between two codes.
        block: Rows and columns of a two-dimensional block, if ``qscheme`` is ``per_block``.
        scale: Format of the scales. Scales are rounded to it before use.
        scale_mode: Rounding mode of the exponent of a power-of-two scale.
        float_zero_point: Whether zero points keep their fraction.
        per_token: Whether each position along all axes but the last has its own scale.
        flat: Whether groups and blocks treat all axes but the first as one, as in the weight of a
            convolution.
        signed_scales: Whether a scale of symmetric integers is negative where the value that is
            farthest from zero is positive. Then that value has the smallest code, which is one
            step farther from zero than the largest.
        four_over_six: Whether dynamic scales of fp4 are chosen block by block; see
            ``numerics.four_over_six``.
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
    signed_scales: bool = False
    four_over_six: bool = False

    @property
    def has_zero_point(self) -> bool:
        """Whether codes have an offset: all integers, of which symmetric ones store a constant."""
        return not self.fmt.is_float and not self.shares_exponents

    @property
    def shares_exponents(self) -> bool:
        """Whether the elements of a block share an exponent."""
        return self.fmt.block > 0 or self.scale == E8M0

    @property
    def scales_by_powers(self) -> bool:
        """Whether every scale is a power of two."""
        return self.fmt.block > 0 or self.scale.power_of_two

    @property
    def divides(self) -> bool:
        """Whether values are divided by scales instead of multiplied by their reciprocals."""
        return self.fmt.is_float or self.scales_by_powers

    @cached_property
    def text(self) -> str:
        """The scheme as JSON, equal for equal schemes: the fields that have no default value.

        Example, uint4 in groups of 32:
        ``{"fmt": "uint4", "qscheme": "per_group", "axis": 1, "group": 32, "symmetric": false}``.
        """
        return json.dumps({"fmt": format_entry(self.fmt)} | changed_fields(self, Scheme(self.fmt)))

    @staticmethod
    def from_text(text: str) -> Scheme:
        """Return the scheme of a text.

        Raises:
            ValueError: The text is not JSON, or a name in it is not known.
            KeyError: A name of a mode is not known, or there is no format.
            TypeError: A field is not known.
        """
        return _from_text(text)

    def blocks(self, shape: torch.Size | tuple[int, ...]) -> Blocks:
        """Return the blocks that share a scale in a tensor of shape ``shape``."""
        return _blocks(self, tuple(shape))

    def scale_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor; see ``blocks.scale_shape``."""
        grid = self.blocks(shape).grid
        return scale_shape(tuple(shape), self.qscheme, self.axis, grid, self.per_token)


@lru_cache(maxsize=1024)
def _from_text(text: str) -> Scheme:
    return Scheme(**read_fields(json.loads(text)))


@lru_cache(maxsize=1024)
def _blocks(scheme: Scheme, shape: tuple[int, ...]) -> Blocks:
    if scheme.flat and scheme.qscheme in GROUPED and len(shape) > 2:
        shape = (shape[0], math.prod(shape[1:]))
    group = scheme.fmt.sub_block or scheme.group
    block = block_shape(shape, scheme.qscheme, scheme.axis, group, scheme.per_token, scheme.block)
    return Blocks.cover(shape, block)
