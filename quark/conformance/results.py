"""Results of this package for comparisons, by the functions that quantized layers use."""

from __future__ import annotations

import torch

from quark.conformance.samples import BLOCK
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.numerics.scale_formats import E4M3, E8M0
from quark.torch.numerics.scheme import Scheme

# Elements of MX blocks.
MX_FLOATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4")
SHARED_EXPONENTS = ("mx", "mx6", "mx9", "bfp16")  # formats of integers


def floats() -> list[str]:
    """Return the names of the float formats, and of those whose values are a table."""
    return [dtype.name for dtype in Dtype if dtype.value.is_float]


def integers() -> list[str]:
    """Return the names of the integer formats of at most 16 bits with scales of any value."""
    return [
        dtype.name
        for dtype in Dtype
        if not (dtype.value.is_float or dtype.value.block or dtype.value.fraction_bits)
        and dtype.value.bits <= 16
    ]


def rounded(x: torch.Tensor, fmt: Format, mode: RoundType = RoundType.half_even) -> torch.Tensor:
    """Return values rounded to a format under the scale 1, in the type of ``x``."""
    return fake_quantize(x.clone(), torch.ones(()), None, Scheme(fmt, rounding=mode))


def through_codes(
    x: torch.Tensor, fmt: Format, mode: RoundType = RoundType.half_even
) -> torch.Tensor:
    """Return the values of the codes of values under the scale 1, float32."""
    scheme = Scheme(fmt, rounding=mode)
    one = torch.ones(())
    return dequantize(quantize(x.clone(), one, None, scheme), one, None, scheme)


def mx_scheme(fmt: Format, mode: str = "even") -> Scheme:
    """Return the scheme of MX blocks of 32 elements."""
    per_group = QSchemeType.per_group
    return Scheme(fmt, per_group, axis=-1, group=BLOCK, scale=E8M0, scale_mode=mode)


def shared_exponent_scheme(fmt: Format) -> Scheme:
    """Return the scheme of blocks that share an exponent, by default of 32 elements."""
    if not fmt.block:
        return mx_scheme(fmt)
    return Scheme(fmt, QSchemeType.per_group, axis=-1, group=fmt.block)


def nvfp4_scheme() -> Scheme:
    """Return the scheme of NVFP4: blocks of 16 elements, scales in fp8_e4m3 and a tensor scale."""
    return Scheme(Dtype.fp4.value, QSchemeType.per_group, axis=-1, group=16, scale=E4M3)


def in_blocks(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return values rounded under the scales of their own blocks, in the type of ``x``."""
    scale, zero_point = dynamic_qparams(x, scheme)
    codes = quantize(x, scale, zero_point, scheme)
    return dequantize(codes, scale, zero_point, scheme, x.dtype)
