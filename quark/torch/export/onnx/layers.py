"""Quantized layers as the exporter of torch traces them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.functions import Functions, Quantized
from quark.torch.export.onnx.matmul_nbits import BitsProduct, bits_problem
from quark.torch.export.onnx.placeholders import Dequantized
from quark.torch.numerics.hadamard import rotate
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed
from quark.torch.quantization.nn.packed import PackedMixin

Layer = QuantMixin | PackedMixin


class OnnxLayer(nn.Module):
    """A quantized layer with the same outputs, which the exporter of torch traces.

    Args:
        layer: A frozen or packed layer. It is not changed.
        matmul_nbits: Whether a linear layer of which only the weight is quantized, to integers,
            becomes a MatMulNBits.
        functions: Those that the graph calls.
    """

    weight: Any
    bias: Any
    rotation: torch.Tensor | None

    def __init__(self, layer: Layer, matmul_nbits: bool, functions: Functions) -> None:
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
            self.weight = Dequantized(weight, self.dtype, is_matrix)
        pairs = not isinstance(self.weight, Dequantized) or self.weight.stored.is_pairable
        self.input = None if inputs is None else Quantized(inputs, pairs, functions)
        self.output = None if output is None else Quantized(output, True, functions)
        bias, values = layer.state("bias"), layer.value("bias")
        if bias is not None:
            self.bias = Dequantized(bias, self.dtype)
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
