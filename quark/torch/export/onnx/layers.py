"""Quantized layers in a form that the exporter of torch can trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.activations import ActivationQuantizer
from quark.torch.export.onnx.functions import FunctionTable
from quark.torch.export.onnx.matmul_nbits import MatMulNBits, matmul_nbits_problem
from quark.torch.export.onnx.placeholders import ParameterPlaceholder
from quark.torch.numerics.hadamard import rotate
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor


class OnnxLayer(nn.Module):
    """A traceable layer with the same outputs as a quantized one.

    Args:
        layer: A frozen or packed layer. It is not changed.
        matmul_nbits: Whether a linear layer with an integer weight and float inputs becomes a
            MatMulNBits.
        functions: Functions of the graph.
        input_scales: Scales [] of the inputs in a graph, one for each call, None for inputs that
            have none; () in other models.
    """

    weight: Any
    bias: Any
    rotation: torch.Tensor | None
    prescale: torch.Tensor | None
    low_rank_down: torch.Tensor | None
    low_rank_up: torch.Tensor | None

    def __init__(
        self,
        layer: QuantizedLayer,
        matmul_nbits: bool,
        functions: FunctionTable,
        input_scales: Sequence[torch.Tensor | None] = (),
    ) -> None:
        super().__init__()
        self._product = layer.product
        self.quantizes_output = layer.quantizes_output
        self.output_width = layer.output_width if layer.is_linear else None
        self.register_buffer("rotation", _rotation_matrix(layer))
        self.register_buffer("prescale", _values(layer.input_prescale))
        self.register_buffer("low_rank_down", _values(layer.low_rank_down, is_transposed=True))
        self.register_buffer("low_rank_up", _values(layer.low_rank_up, is_transposed=True))
        is_matrix = layer.float_class is nn.Linear
        self.is_linear = layer.is_linear
        self.dtype = layer.value_dtype
        weight = layer.quantized_tensor("weight")
        inputs = layer.quantized_tensor("input_tensors")
        output = layer.quantized_tensor("output_tensors")
        in_nbits = matmul_nbits and is_matrix and inputs is None
        if weight is None:
            value = layer.value("weight")
            assert value is not None
            value = value.detach()
            self.register_buffer("weight", value.T.contiguous() if is_matrix else value)
        elif in_nbits and matmul_nbits_problem(weight.spec) is None:
            self.weight = MatMulNBits(weight, self.dtype)
        else:
            self.weight = ParameterPlaceholder(weight, self.dtype, is_matrix)
        pairs = not isinstance(self.weight, ParameterPlaceholder) or self.weight.stored.is_pairable
        self.input = None if inputs is None else ActivationQuantizer(inputs, pairs, functions)
        self.output = None if output is None else ActivationQuantizer(output, True, functions)
        bias, values = layer.quantized_tensor("bias"), layer.value("bias")
        scales = input_scales or [None if inputs is None else inputs.scale]
        if bias is not None and _is_storable(bias, weight, scales):
            self.bias = ParameterPlaceholder(bias, self.dtype)
        else:
            self.register_buffer("bias", None if values is None else values.detach())

    @property
    def opset(self) -> int:
        """Lowest opset with the operators that are written."""
        opsets = [m.stored.opset for m in self.children() if isinstance(m, ParameterPlaceholder)]
        opsets += [m.opset for m in self.children() if isinstance(m, ActivationQuantizer)]
        return max(opsets, default=0)

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the outputs of the quantized layer."""
        x = input if self.prescale is None else input * self.prescale
        if self.rotation is not None:
            # Rotations of n inputs act on each n neighbours: 1024 inputs, n = 128 -> (…, 8, 128).
            blocks = torch.unflatten(x.float(), -1, (-1, len(self.rotation)))
            x = (blocks @ self.rotation).flatten(-2).to(x.dtype)
        down, up = self.low_rank_down, self.low_rank_up
        branch = None if down is None or up is None else x @ down @ up
        if self.input is not None and x.is_floating_point():
            x = self.input(x)
        dtype = x.dtype if x.is_floating_point() else self.dtype
        weight, bias = self.weight, self.bias
        if isinstance(weight, ParameterPlaceholder):
            weight = weight(dtype)
        if isinstance(bias, ParameterPlaceholder):
            bias = bias(dtype)
        if self.is_linear:
            y = weight(x) if isinstance(weight, MatMulNBits) else x @ weight
            y = y if bias is None else y + bias
        else:
            y = self._product(x, weight, bias, *args, **kwargs)
        y = y if branch is None else y + branch
        return self.quantized_output(y) if self.quantizes_output else y

    def quantized_output(self, y: torch.Tensor) -> torch.Tensor:
        """Quantize the output."""
        return y if self.output is None else self.output(y)


def _is_storable(
    bias: QuantizedTensor,
    weight: QuantizedTensor | None,
    input_scales: Sequence[torch.Tensor | None],
) -> bool:
    """Whether the codes of a bias are stored, not its values.

    Operators of integers (QLinearConv) take an int32 bias in the scale of the products alone: that
    of the weight times that of the input. So codes in another scale are not stored.
    """
    if bias.spec.dtype is not Dtype.int32:
        return True
    if weight is None or weight.scale is None or bias.scale is None:
        return False
    products = [None if s is None else weight.scale.float() * s.float() for s in input_scales]
    return all(p is not None and torch.equal(p, bias.scale.float()) for p in products)


def _values(parameter: torch.Tensor | None, is_transposed: bool = False) -> torch.Tensor | None:
    """Return the values of a parameter, or of its transpose, as a constant of the graph."""
    if parameter is None:
        return None
    values = parameter.detach()
    return values.T.contiguous() if is_transposed else values


def _rotation_matrix(layer: QuantizedLayer) -> torch.Tensor | None:
    """Return the rotation of the inputs as a float32 matrix, or None."""
    rotation = layer.input_rotation
    if rotation is None:
        return None
    return rotate(torch.eye(len(rotation), device=rotation.device, dtype=torch.float32), rotation)
