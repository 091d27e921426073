"""Quantized layers as the exporter of torch traces them: DequantizeLinear and what stands by it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.onnx_nbits import BitsProduct, bits_problem
from quark.torch.export.onnx_scales import POWERS, dynamic_qparams, on_grid, rounds_scales
from quark.torch.export.onnx_types import BLOCKED_OPSET, FLOAT8_OPSET, held
from quark.torch.numerics.blocks import QSchemeType
from quark.torch.numerics.hadamard import rotate
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.numerics.rounding import RoundType
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.mixin import QuantMixin, is_transposed
from quark.torch.quantization.nn.packed import PackedMixin
from quark.torch.quantization.nn.quantizer import State

KIND = "quark.type"  # metadata of a node: ONNX type of its codes
Layer = QuantMixin | PackedMixin


def activation_problem(spec: QuantizationSpec) -> str | None:
    """Return why a graph does not quantize inputs or outputs like that, or None."""
    scheme = spec.scheme
    fmt = scheme.fmt
    if not fmt.is_float and fmt.bits > 16:
        return f"cannot compute {spec.dtype.name}"
    if spec.quantizes_codes:
        return "cannot quantize codes a second time"
    if fmt.scaled and scheme.rounding is not RoundType.half_even:
        return f"rounds half to even, not by {scheme.rounding.name}"
    if scheme.block is not None or (
        scheme.qscheme is QSchemeType.per_group and not spec.is_dynamic
    ):
        return f"cannot settle scales {scheme.qscheme.name}"
    if spec.is_dynamic and rounds_scales(scheme) and not scheme.symmetric:
        return "cannot round dynamic scales where it has zero points"
    return None


class Dequantized(nn.Module):
    """A parameter that is stored in codes.

    Args:
        state: The parameter.
        is_transposed: Whether a matrix is stored, and returned, with its axes exchanged.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(self, state: State, is_transposed: bool = False) -> None:
        super().__init__()
        assert state.codes is not None
        shape, stored = state.codes.shape, held(state)
        self.stored = stored.transposed() if is_transposed else stored
        self.shape = tuple(reversed(shape)) if is_transposed else tuple(shape)
        for name in ("codes", "scale", "zero_point"):
            self.register_buffer(name, getattr(self.stored, name))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in ``dtype``."""
        if self.scale is None:
            return self.codes.to(dtype)
        parts = [self.codes, self.scale, self.zero_point]
        attributes: dict[str, Any] = {}
        if self.stored.axis is not None:
            attributes["axis"] = self.stored.axis
        if self.stored.block:
            attributes["block_size"] = self.stored.block
        value: torch.Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear",
            parts if self.zero_point is not None else parts[:2],
            attributes,
            dtype=torch.float32,
            shape=self.codes.shape,
            metadata_props={KIND: self.stored.kind},
        )
        return _rounded(value.reshape(self.shape), dtype)


class Quantized(nn.Module):
    """Quantizes and dequantizes inputs or outputs.

    One static scale and integers of 8 or 16 bits become QuantizeLinear and DequantizeLinear, which
    software turns into integer products. Everything else is computed as ``numerics.qdq`` does.

    Args:
        state: Specification, and scale where it is static.
        is_pairable: Whether that pair may stand here.
        device: Where the layer is.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    powers: torch.Tensor

    def __init__(self, state: State, is_pairable: bool, device: torch.device) -> None:
        super().__init__()
        scheme, scale, zeros = state.scheme, state.scale, state.zero_point
        fmt = scheme.fmt
        per_tensor = scheme.qscheme is QSchemeType.per_tensor
        self.scheme = scheme
        self.is_static = fmt.scaled and not state.spec.is_dynamic
        has_bytes = not fmt.is_float and fmt.bits in (8, 16) and not scheme.float_zero_point
        self.is_pair = is_pairable and self.is_static and per_tensor and has_bytes
        has_zeros = zeros is not None and not (scheme.symmetric and fmt.signed)
        if self.is_static:
            assert scale is not None
            zeros = zeros if has_zeros else torch.zeros_like(scale)
        scale = scale.float() if self.is_static and scale is not None else None
        kept = self.is_pair or (self.is_static and has_zeros)
        kind = fmt.code_dtype if self.is_pair else torch.float32
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zeros.to(kind) if kept and zeros is not None else None)
        two_level = scheme.scale.two_level and not self.is_static
        self.register_buffer("tensor_scale", state.scale_2 if two_level else None)
        uses_powers = scheme.divides and not self.is_static
        self.register_buffer("powers", POWERS.to(device) if uses_powers else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the quantized values of ``x``, in its type."""
        fmt, scheme = self.scheme.fmt, self.scheme
        if not fmt.scaled:
            bound = torch.finfo(fmt.code_dtype).max
            return x.float().clamp(-bound, bound).to(fmt.code_dtype).to(x.dtype)
        if self.is_pair:
            return _rounded(self._paired(x.float()), x.dtype)
        wide, axis, group = x.float(), scheme.axis % x.dim(), fmt.sub_block or scheme.group
        length = x.shape[axis]
        if scheme.qscheme is QSchemeType.per_group and group != -1:
            wide = torch.unflatten(_padded(wide, axis, group), axis, (-1, group))
            axis += 1
        scale, zeros = (self._settled if self.is_static else self._own)(wide, axis)
        wide = wide / scale if scheme.divides else wide * scale.reciprocal()
        if fmt.is_float:
            wide = on_grid(wide, fmt)
        elif zeros is None:
            wide = wide.round().clamp(fmt.qmin, fmt.qmax)
        elif scheme.float_zero_point:
            wide = (wide + zeros).round().clamp(fmt.qmin, fmt.qmax) - zeros
        else:
            wide = (wide.round() + zeros).clamp(fmt.qmin, fmt.qmax) - zeros
        wide = wide * scale
        if wide.dim() > x.dim():
            wide = wide.flatten(axis - 1, axis)
            wide = wide if length % group == 0 else wide.narrow(axis - 1, 0, length)
        return _rounded(wide, x.dtype)

    @property
    def opset(self) -> int:
        """Lowest opset that has what is written."""
        fmt, scale = self.scheme.fmt, self.scheme.scale.fmt
        if self.is_pair and fmt.bits > 8:
            return BLOCKED_OPSET
        casts = any(f.native is not None and f.bits == 8 for f in (fmt, scale or fmt))
        return FLOAT8_OPSET if casts else 0

    def _paired(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[Any] = [self.scale, self.zero_point]
        kind = self.scheme.fmt.code_dtype
        codes = torch.onnx.ops.symbolic("QuantizeLinear", [x, *parts], dtype=kind, shape=x.shape)
        values: torch.Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear", [codes, *parts], dtype=torch.float32, shape=x.shape
        )
        return values

    def _settled(self, x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point so that they broadcast over ``x``."""
        scale, zeros = self.scale, self.zero_point
        assert scale is not None
        if self.scheme.qscheme is QSchemeType.per_channel:
            shape = [-1 if i == axis else 1 for i in range(x.dim())]
            scale = scale.reshape(shape)
            zeros = None if zeros is None else zeros.reshape(shape)
        return scale, zeros

    def _own(self, x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point of the values of ``x`` itself, so that they broadcast."""
        scheme, where = self.scheme, tuple(range(x.dim()))
        if scheme.qscheme is not QSchemeType.per_tensor:
            where = (-1,) if scheme.per_token else (axis,)
        lo, hi = x.amin(where, keepdim=True), x.amax(where, keepdim=True)
        return dynamic_qparams(lo, hi, axis - 1, scheme, self.powers, self.tensor_scale)


class OnnxLayer(nn.Module):
    """A quantized layer with the same outputs, which the exporter of torch traces.

    Args:
        layer: A frozen or packed layer. It is not changed.
        matmul_nbits: Whether a linear layer of which only the weight is quantized, to integers,
            becomes a MatMulNBits.
    """

    weight: Any
    bias: Any
    rotation: torch.Tensor | None

    def __init__(self, layer: Layer, matmul_nbits: bool) -> None:
        super().__init__()
        self._product = layer.product
        self.quantizes_output, self.output_width = layer.quantizes_output, _outputs(layer)
        self.register_buffer("rotation", _matrix(layer))
        is_matrix = layer.float_class is nn.Linear
        self.is_linear = is_matrix or is_transposed(layer.float_class)
        self.dtype = _dtype(layer)
        weight = layer.state("weight")
        inputs, output = layer.state("input_tensors"), layer.state("output_tensors")
        in_bits = matmul_nbits and is_matrix and weight is not None and inputs is None
        if weight is None:
            value = layer.value("weight")
            assert value is not None
            value = value.detach()
            self.register_buffer("weight", value.T.contiguous() if is_matrix else value)
        elif in_bits and bits_problem(weight.spec) is None:
            self.weight = BitsProduct(weight)
        else:
            self.weight = Dequantized(weight, is_matrix)
        pairs = not isinstance(self.weight, Dequantized) or self.weight.stored.is_pairable
        device = layer.weight.device
        self.input = None if inputs is None else Quantized(inputs, pairs, device)
        self.output = None if output is None else Quantized(output, True, device)
        bias, values = layer.state("bias"), layer.value("bias")
        if bias is not None:
            self.bias = Dequantized(bias)
        else:
            self.register_buffer("bias", None if values is None else values.detach())

    @property
    def opset(self) -> int:
        """Lowest opset that has what is written."""
        found = [m.stored.opset for m in self.children() if isinstance(m, Dequantized)]
        found += [m.opset for m in self.children() if isinstance(m, Quantized)]
        return max(found, default=0)

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute what the quantized layer does."""
        x = input
        if self.rotation is not None:
            blocks = torch.unflatten(x.float(), -1, (-1, len(self.rotation)))
            x = (blocks @ self.rotation).flatten(-2).to(x.dtype)
        if self.input is not None and x.is_floating_point():
            x = self.input(x)
        dtype = x.dtype if x.is_floating_point() else self.dtype
        weight, bias = self.weight, self.bias
        if isinstance(weight, Dequantized):
            weight = weight(dtype)
        if isinstance(bias, Dequantized):
            bias = bias(dtype)
        if self.is_linear:
            y = weight(x) if isinstance(weight, BitsProduct) else x @ weight
            y = y if bias is None else y + bias
        else:
            y = self._product(x, weight, bias, *args, **kwargs)
        return self.quantized_output(y) if self.quantizes_output else y

    def quantized_output(self, y: torch.Tensor) -> torch.Tensor:
        """Quantize the output."""
        return y if self.output is None else self.output(y)


def _padded(x: torch.Tensor, axis: int, group: int) -> torch.Tensor:
    """Return ``x`` with zeros at the end of an axis, up to whole groups."""
    missing = -x.shape[axis] % group
    return F.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, missing)) if missing else x


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float32 values to the type of the layer; float16 saturates."""
    if dtype == torch.float16:
        x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return x.to(dtype)


def _matrix(layer: Layer) -> torch.Tensor | None:
    """Return the rotation of the inputs as a float32 matrix, or None."""
    rotation = layer.input_rotation
    if rotation is None:
        return None
    return rotate(torch.eye(len(rotation), device=rotation.device), rotation)


def _outputs(layer: Layer) -> int | None:
    """Return the number of outputs of a linear layer, which attention asks for."""
    is_linear = layer.float_class is nn.Linear or is_transposed(layer.float_class)
    return layer.output_width if is_linear else None


def _dtype(layer: Layer) -> torch.dtype:
    return layer.value_dtype if isinstance(layer, PackedMixin) else layer.weight.dtype
