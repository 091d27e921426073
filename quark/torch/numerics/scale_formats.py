"""Number formats of scales."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from quark.torch.numerics.dtypes import torch_dtype
from quark.torch.numerics.formats import Dtype, Format

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScaleFormat:
    """Number format of scales.

    Attributes:
        dtype: Name of the type of a stored scale.
        fmt: Format that scales are rounded to if it is narrower than that type, or None.
        power_of_two: Whether scales are powers of two.
        two_level: Whether scales are rounded relative to a float32 tensor scale.
        span: Neighbouring blocks whose scales are integers times one float16 number; 0 = none.
            See ``super_blocks``.
    """

    dtype: str = "float32"
    fmt: Format | None = None
    power_of_two: bool = False
    two_level: bool = False
    span: int = 0

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of a stored scale."""
        return torch_dtype(self.dtype)

    @property
    def held_dtype(self) -> torch.dtype:
        """Type of a scale in memory. Scales in narrow formats are float32 there."""
        is_held = self.stored_dtype.is_floating_point and self.fmt is None
        return self.stored_dtype if is_held else torch_dtype("float32")


FLOAT32 = ScaleFormat()
POF2 = ScaleFormat(power_of_two=True)
E8M0 = ScaleFormat("uint8", power_of_two=True)
E4M3 = ScaleFormat(fmt=Dtype.fp8_e4m3.value, two_level=True)  # times the tensor scale: float32
E5M3 = ScaleFormat("uint8", Dtype.fp8_e5m3.value)


class ScaleType(Enum):
    """Type in which scales are stored. ``float`` is float32, ``pof2`` a float32 power of two.

    ``power_of_2`` is another name of ``pof2``.
    """

    float = "float"
    pof2 = "pof2"
    power_of_2 = "pof2"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float8_e5m3 = "float8_e5m3"
    float8_e8m0fnu = "float8_e8m0fnu"

    @property
    def format(self) -> ScaleFormat:
        """The format of the scales."""
        named = {"float": FLOAT32, "pof2": POF2, "float8_e5m3": E5M3, "float8_e8m0fnu": E8M0}
        return named.get(self.value) or ScaleFormat(self.value)


# Scales in super-blocks: format of the integers x blocks that share a float16 number.
SUPER_BLOCKS = {
    "uint4x16": ScaleFormat(fmt=Dtype.uint4.value, span=16),
    "int6x16": ScaleFormat(fmt=Dtype.int6.value, span=16),
    "uint6x8": ScaleFormat(fmt=Dtype.uint6.value, span=8),
    "int8x16": ScaleFormat(fmt=Dtype.int8.value, span=16),
}
# Names of ``scale_format`` in configurations.
SCALE_FORMATS = {"float32": FLOAT32, "e8m0": E8M0, "e4m3": E4M3, "e5m3": E5M3, **SUPER_BLOCKS}
