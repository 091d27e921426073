"""Weights in the blocks of ggml, by the names of their types there."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import SCALE_FORMATS, SUPER_BLOCKS
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec

TWO_LEVEL = "fp8_e4m3"  # scales in this format, times a float32 number for the whole tensor


class BlockScheme(NamedTuple):
    """How a weight in blocks is quantized.

    Attributes:
        dtype: Format of the codes.
        group: Neighbouring inputs that share a scale.
        has_minima: Whether groups have a minimum beside their scale. Scales of other integers are
            signed, as in ggml.
        scale: Format of the scales: ``float16``, a ``scale_format``, or ``TWO_LEVEL``.
        fallback: Scheme of layers whose inputs super-blocks do not divide, as in llama.cpp.
    """

    dtype: str
    group: int
    has_minima: bool
    scale: str = "float16"
    fallback: str = ""

    @property
    def fmt(self) -> Format:
        """Number format of the codes."""
        fmt: Format = Dtype[self.dtype].value
        return fmt

    @property
    def has_super_blocks(self) -> bool:
        """Whether scales are integers times a float16 number; see ``SUPER_BLOCKS``."""
        return self.scale in SUPER_BLOCKS

    @property
    def has_half_scales(self) -> bool:
        """Whether each scale is a float16 number."""
        return self.scale == "float16"

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a float32 number multiplies the scales of a tensor."""
        return self.scale == TWO_LEVEL

    def fits(self, spec: QuantizationSpec) -> bool:
        """Whether a specification has these codes and scales, along the last of two axes."""
        own, other = _scheme_of(self), spec.scheme
        is_along_rows = other.axis in (1, -1) and not spec.quantizes_codes
        names = ("fmt", "qscheme", "group", "symmetric", "scale", "float_zero_point")
        return is_along_rows and all(getattr(own, n) == getattr(other, n) for n in names)

    def spec(self, **changes: Any) -> QuantizationSpec:
        """Return the specification of a weight.

        Args:
            changes: Fields with other values.
        """
        fields: dict[str, Any] = {
            "dtype": self.dtype,
            "qscheme": "per_group",
            "ch_axis": -1,
            "group_size": self.group,
            "is_dynamic": False,
            "round_method": "half_even",
        }
        if self.has_tensor_scale:
            fields["second_stage"] = _TENSOR_SCALE
        else:
            fields["scale_format" if self.scale in SCALE_FORMATS else "scale_type"] = self.scale
        if not self.fmt.is_float:
            fields["symmetric"] = fields["signed_scales"] = not self.has_minima
        if self.has_super_blocks:
            fields["observer_cls"] = "SuperBlockObserver"
        if self.has_minima and self.has_super_blocks:
            fields["zero_point_type"] = "float32"
        return QuantizationSpec(**fields | changes)


@cache
def _scheme_of(kind: BlockScheme) -> Scheme:
    return kind.spec().scheme


_TENSOR_SCALE = QuantizationSpec(
    Dtype[TWO_LEVEL],
    qscheme=QSchemeType.per_tensor,
    symmetric=True,
    is_dynamic=False,
    is_scale_quant=True,
)
BLOCK_SCHEMES = {
    "q4_0": BlockScheme("int4", 32, False),
    "q4_1": BlockScheme("uint4", 32, True),
    "q5_0": BlockScheme("int5", 32, False),
    "q5_1": BlockScheme("uint5", 32, True),
    "q8_0": BlockScheme("int8", 32, False),
    "iq4_nl": BlockScheme("iq4_nl", 32, False),
    "q2_k": BlockScheme("uint2", 16, True, "uint4x16", "iq4_nl"),
    "q3_k": BlockScheme("int3", 16, False, "int6x16", "iq4_nl"),
    "q4_k": BlockScheme("uint4", 32, True, "uint6x8", "q5_0"),
    "q5_k": BlockScheme("uint5", 32, True, "uint6x8", "q5_1"),
    "q6_k": BlockScheme("int6", 16, False, "int8x16", "q8_0"),
}


def fallback_of(spec: QuantizationSpec) -> str:
    """Return the name of the scheme for layers that the super-blocks of a scheme do not divide.

    Returns:
        A name of ``BLOCK_SCHEMES``; empty if the specification is not one of these schemes.
    """
    return next((kind.fallback for kind in BLOCK_SCHEMES.values() if kind.fits(spec)), "")
