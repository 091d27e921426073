"""Quantizers of packed weights and of inputs, as serving software makes them for MX layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.numerics.custom_operators import dequantize, fake_quantize_dynamic, unpack
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_codec import decode_scale, stored_dtype
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.quantization.config.spec import QuantizationSpec

__all__ = ["RealQuantizer", "get_real_quantizer"]


class RealQuantizer(nn.Module):
    """Dequantizes packed codes, or rounds values under scales for their own blocks.

    Args:
        spec: An MX specification, along the last axis.
        holds_codes: Whether inputs are packed codes.
        dtype: Type of the dequantized values; None for float32.
        scale_shape: Shape of ``scale``.
        device: Device of ``scale``.

    Attributes:
        scale: Biased exponents of packed codes, uint8 (…, n / 32).
    """

    def __init__(
        self,
        spec: QuantizationSpec,
        holds_codes: bool,
        dtype: torch.dtype | None,
        scale_shape: tuple[int, ...],
        device: Any,
    ) -> None:
        super().__init__()
        self.spec, self.holds_codes, self.dtype = spec, holds_codes, dtype or torch.float32
        self.scale: torch.Tensor
        empty = torch.empty(scale_shape, dtype=stored_dtype(spec.scheme), device=device)
        self.register_buffer("scale", empty if holds_codes else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of packed codes (…, bytes), or rounded values in the type of ``x``."""
        scheme, fmt = self.spec.scheme, self.spec.fmt
        if not self.holds_codes:
            return fake_quantize_dynamic(x, scheme)
        codes = unpack(x, fmt, 8 * x.itemsize * x.shape[-1] // fmt.bits)
        scale = decode_scale(self.scale, scheme, tuple(codes.shape))
        return dequantize(codes, scale, None, scheme, self.dtype)


def get_real_quantizer(
    qspec: QuantizationSpec,
    quantizer: nn.Module | None,
    reorder: bool | None = None,
    real_quantized: bool | None = None,
    float_dtype: torch.dtype | None = None,
    device: Any = None,
    scale_shape: tuple[int, ...] | None = None,
    zero_point_shape: tuple[int, ...] | None = None,
) -> RealQuantizer:
    """Return a quantizer for tensors as MX checkpoints store them.

    Args:
        qspec: Specification of the tensor: MX blocks along the last axis.
        quantizer: Must be None: scales are assigned to ``scale``.
        reorder: No effect: MX codes have one order.
        real_quantized: Whether the quantizer receives packed codes; else values, which it rounds.
        float_dtype: Type of the dequantized values. None: float32.
        device: Device of the scales. None: the default device.
        scale_shape: Shape of the scales of packed codes.
        zero_point_shape: Must be None: MX blocks have no zero points.

    Raises:
        ValueError: The specification is another one, or an argument is not supported.
    """
    scheme = qspec.scheme
    is_mx = scheme.qscheme is QSchemeType.per_group and scheme.scale == E8M0
    if not is_mx or scheme.axis != -1 or qspec.second_stage is not None:
        raise ValueError(
            f"get_real_quantizer takes MX specifications along the last axis, such as those of "
            f"OCP_MXFP4Spec(ch_axis=-1), got {qspec.dtype.name} {scheme.qscheme.name}."
        )
    if quantizer is not None or zero_point_shape is not None:
        raise ValueError(
            "get_real_quantizer: quantizer and zero_point_shape are not supported, since scales "
            "are assigned and there are no zero points. Leave them None."
        )
    if real_quantized and scale_shape is None:
        raise ValueError("get_real_quantizer: packed codes need scale_shape, got None.")
    return RealQuantizer(qspec, bool(real_quantized), float_dtype, scale_shape or (), device)
