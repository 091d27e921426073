"""MXFP4 as serving software calls it: blocks of 32 along the last axis, E8M0 scales.

Values and codes are those of the layers of this package (OCP Microscaling specification 1.0).
"""

from __future__ import annotations

import torch

from quark.torch.kernel.blocks import MODES, block_scheme, check_mode, check_packed
from quark.torch.numerics.custom_operators import dequantize, fake_quantize_dynamic, unpack
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scale_codec import decode_scale

BLOCK = 32
FP4 = Dtype.fp4.value
SCHEMES = {mode: block_scheme(FP4, -1, BLOCK, mode) for mode in MODES}


def dq_mxfp4(x: torch.Tensor, scale: torch.Tensor, float_dtype: torch.dtype) -> torch.Tensor:
    """Return the values of packed MXFP4 codes.

    Args:
        x: Pairs of codes, the first in the lower bits, uint8 (…, n / 2).
        scale: Biased exponents, uint8 (…, n / 32).
        float_dtype: Type of the values.

    Returns:
        (…, n).

    Raises:
        ValueError: Types or shapes do not fit.
    """
    count = 2 * x.shape[-1]
    check_packed(x, scale, (*x.shape[:-1], -(-count // BLOCK)))
    codes, scheme = unpack(x, FP4, count), SCHEMES["even"]
    scales = decode_scale(scale, scheme, codes.shape)
    return dequantize(codes, scales, None, scheme, float_dtype)


def qdq_mxfp4(x: torch.Tensor, scale_calculation_mode: str = "even") -> torch.Tensor:
    """Return values rounded to MXFP4 under scales for their own blocks, in the type of ``x``.

    Args:
        x: Values (…, n).
        scale_calculation_mode: How exponents of scales are rounded: ``even``, ``floor`` or
            ``ceil``; see ``numerics.exponents.shared_exponent``.

    Raises:
        ValueError: The mode is not known.
    """
    check_mode(scale_calculation_mode)
    return fake_quantize_dynamic(x, SCHEMES[scale_calculation_mode])
