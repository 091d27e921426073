"""Quantized inputs and outputs of layers in an ONNX graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.dequantize_linear import BLOCKED_OPSET, FLOAT8_OPSET
from quark.torch.export.onnx.functions import (
    DOMAIN,
    FunctionSignature,
    FunctionTable,
    size_axis,
    to_layer_dtype,
)
from quark.torch.export.onnx.scales import rounds_scales
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import QuantizedTensor


def activation_problem(spec: QuantizationSpec) -> str | None:
    """Return why a graph cannot quantize inputs or outputs this way, or None."""
    scheme = spec.scheme
    fmt = scheme.fmt
    if not fmt.is_float and fmt.bits > 16:
        return f"cannot compute {spec.dtype.name}"
    if spec.quantizes_codes:
        return "cannot quantize codes a second time"
    if fmt.scaled and scheme.rounding is not RoundType.half_even:
        return f"rounds half to even, not by {scheme.rounding.name}"
    if scheme.four_over_six:
        return "cannot choose scales between 4 and 6 (four_over_six)"
    if scheme.block is not None or (
        scheme.qscheme is QSchemeType.per_group and not spec.is_dynamic
    ):
        return f"cannot compute scales {scheme.qscheme.name}"
    if spec.is_dynamic and rounds_scales(scheme) and not scheme.symmetric:
        return "cannot round dynamic scales where it has zero points"
    return None


def _by_channel(
    state: QuantizedTensor,
) -> tuple[Scheme, torch.Tensor | None, torch.Tensor | None]:
    """Return the scheme, scale and zero point of a tensor, per channel where they are per head."""
    scheme, scale, zeros = state.scheme, state.scale, state.zero_point
    if scheme.qscheme is not QSchemeType.per_head:
        return scheme, scale, zeros
    per_channel = replace(scheme, qscheme=QSchemeType.per_channel, group=-1)
    parts = [x if x is None else x.repeat_interleave(scheme.group) for x in (scale, zeros)]
    return per_channel, parts[0], parts[1]


class ActivationQuantizer(nn.Module):
    """Quantizes and dequantizes inputs or outputs.

    One static scale and integers of 8 or 16 bits become a pair of QuantizeLinear and
    DequantizeLinear, which software fuses into integer products. Everything else is a function
    that computes the same values as ``numerics.qdq``.

    Args:
        state: Specification, with the scale and zero point if they are static.
        allows_pair: Whether the pair may be used.
        functions: Functions of the graph.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    tensor_scale: torch.Tensor | None

    def __init__(self, state: QuantizedTensor, allows_pair: bool, functions: FunctionTable) -> None:
        super().__init__()
        scheme, scale, zeros = _by_channel(state)
        fmt = scheme.fmt
        per_tensor = scheme.qscheme is QSchemeType.per_tensor
        self.scheme, self.functions = scheme, functions
        is_static = fmt.scaled and not state.spec.is_dynamic
        has_bytes = not fmt.is_float and fmt.bits in (8, 16) and not scheme.float_zero_point
        self.is_pair = allows_pair and is_static and per_tensor and has_bytes
        has_zeros = zeros is not None and not (scheme.symmetric and fmt.signed)
        if is_static:
            assert scale is not None
            zeros = zeros if has_zeros else torch.zeros_like(scale)
        scale = scale.float() if is_static and scale is not None else None
        needs_zeros = self.is_pair or (is_static and has_zeros)
        dtype = fmt.code_dtype if self.is_pair else torch.float32
        zeros = zeros.to(dtype) if needs_zeros and zeros is not None else None
        two_level = scheme.scale.two_level and not is_static
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zeros)
        self.register_buffer("tensor_scale", state.scale_2 if two_level else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the quantized values of ``x``, in its type."""
        fmt = self.scheme.fmt
        if not fmt.scaled:
            bound = torch.finfo(fmt.code_dtype).max
            return x.float().clamp(-bound, bound).to(fmt.code_dtype).to(x.dtype)
        if self.is_pair:
            return to_layer_dtype(self._quantize_dequantize(x.float()), x.dtype)
        parts = dict(self.named_buffers())
        shapes = tuple((name, tuple(part.shape)) for name, part in parts.items())
        axis = size_axis(self.scheme, "scale" in parts)
        shape = tuple(
            int(n) if axis is not None and i == axis % x.dim() else None
            for i, n in enumerate(x.shape)
        )
        name = self.functions.name(FunctionSignature(self.scheme, shape, x.dtype, shapes))
        y: torch.Tensor = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{name}", [x, *parts.values()], dtype=x.dtype, shape=x.shape, version=1
        )
        return y

    @property
    def opset(self) -> int:
        """Lowest opset with the operators that are written."""
        fmt, scale = self.scheme.fmt, self.scheme.scale.fmt
        if self.is_pair and fmt.bits > 8:
            return BLOCKED_OPSET
        casts = any(f.native is not None and f.bits == 8 for f in (fmt, scale or fmt))
        return FLOAT8_OPSET if casts else 0

    def _quantize_dequantize(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[Any] = [self.scale, self.zero_point]
        dtype = self.scheme.fmt.code_dtype
        codes = torch.onnx.ops.symbolic("QuantizeLinear", [x, *parts], dtype=dtype, shape=x.shape)
        values: torch.Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear", [codes, *parts], dtype=torch.float32, shape=x.shape
        )
        return values
