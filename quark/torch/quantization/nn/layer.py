"""The base of every quantized operator: quantizers around the product of a float operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from quark.torch.numerics.custom_operators import rotate
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.linear_classes import operator_class
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.convolution import (
    CONVOLUTIONS,
    TRANSPOSED,
    convolution_matrix,
    convolution_weight,
    iterate_windows,
)
from quark.torch.quantization.nn.quantizer import QuantizedTensor
from quark.torch.quantization.nn.typed_buffers import TypedBuffers

# Tensor of the configuration -> attributes in which operators hold the number of its channels.
_CHANNELS = {
    "input_tensors": ("in_features", "in_channels", "nx"),
    "output_tensors": ("out_features", "out_channels", "nf", "embedding_dim"),
}


class QuantizedLayer(TypedBuffers):
    """An operator whose input, weight, bias and output are quantized.

    Subclasses hold the weight as values (``FakeQuantizedLayer``) or as stored in a checkpoint
    (``PackedLayer``). Both change the class of a float module in place, so that every reference to
    the module sees the change.

    Attributes:
        float_class: Class of the float operator.
        quant_config: Configuration of the layer.
        frozen: Whether weight and bias are quantized values or codes already.
        input_rotation: Rotation of the input before it is quantized, which the weight undoes:
            (n, n) int8 ±1 or an orthogonal matrix, for each n inputs; or None.
        input_prescale: Factors of the inputs before they are rotated, which the weight undoes:
            (inputs,); or None.
        low_rank_down: First matrix of a branch beside the weight that reads the inputs before they
            are quantized: (rank, inputs); or None.
        low_rank_up: Its second matrix, (outputs, rank); or None.
        quantizes_output: Whether the layer quantizes its output. If not, attention does so later.
    """

    float_class: ClassVar[type[nn.Module]]
    quant_config: QuantizationConfig
    frozen: bool
    input_rotation: torch.Tensor | None
    input_prescale: nn.Parameter | None
    low_rank_down: nn.Parameter | None
    low_rank_up: nn.Parameter | None
    quantizes_output = True
    weight: Any
    bias: Any

    @property
    def is_linear(self) -> bool:
        """Whether the output is the product of the last axis of the input and a matrix."""
        return is_linear(self.float_class)

    @property
    def is_convolution(self) -> bool:
        """Whether the output is the product of windows of the input and a matrix."""
        return issubclass(self.float_class, CONVOLUTIONS)

    @property
    def has_matrix(self) -> bool:
        """Whether the weight is a matrix for rows of inputs: of linear layers and convolutions."""
        return self.is_linear or self.is_convolution

    @property
    def input_axis(self) -> int:
        """Axis of the inputs in the weight of a linear layer: 1, or 0 for ``Conv1D``."""
        return input_axis(self.float_class)

    @property
    def is_transposed(self) -> bool:
        """Whether the weight of a convolution is (inputs, outputs, *kernel)."""
        return issubclass(self.float_class, TRANSPOSED)

    @property
    def channel_groups(self) -> int:
        """Number of groups of inputs, each of which meets its own rows of the matrix."""
        groups: Any = getattr(self, "groups", 1)
        return int(groups) if self.is_convolution else 1

    def to_matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight, or a tensor in its shape, as a matrix (outputs, inputs).

        The inputs of a convolution are the values of a window; see ``nn.convolution``.
        """
        if self.is_convolution:
            return convolution_matrix(weight, self.channel_groups, self.is_transposed)
        return weight if self.input_axis else weight.T

    def from_matrix(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a matrix (outputs, inputs) in the shape of the weight."""
        if self.is_convolution:
            shape = self.shape("weight")
            return convolution_weight(matrix, shape, self.channel_groups, self.is_transposed)
        return matrix if self.input_axis else matrix.T

    def input_rows(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        """Iterate over the rows that the matrix multiplies, in pieces that bound the memory.

        Args:
            x: Input of the layer.
            args: Other arguments of the layer.
            kwargs: Likewise, by name.

        Yields:
            (tokens, inputs); (groups, tokens, inputs) for several groups.
        """
        if self.is_convolution:
            yield from iterate_windows(self, x, *args, **kwargs)
        else:
            yield x.reshape(-1, x.shape[-1])

    @property
    def input_width(self) -> int:
        """Number of inputs of a linear layer."""
        return self.shape("weight")[self.input_axis]

    @property
    def output_width(self) -> int:
        """Number of outputs of a linear layer."""
        return self.shape("weight")[1 - self.input_axis]

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the values of the weight."""
        raise NotImplementedError

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of ``weight`` or ``bias``, unpacked."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the configuration; see ``activation_shape``."""
        if name in PARAMETERS:
            return self.parameter_shape(name)
        return activation_shape(self, name, getattr(self.quant_config, name).scheme)

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the quantized values of the weight or the bias, or None.

        Args:
            name: ``weight`` or ``bias``.
            dtype: Type of the result, ``value_dtype`` by default.
        """
        raise NotImplementedError

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """Return codes and scales of a tensor of the configuration; None if it is in float."""
        raise NotImplementedError

    def quantize_activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``input_tensors`` or ``output_tensors`` fake-quantized."""
        raise NotImplementedError

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the quantized values of weight and bias, in the type that goes with ``x``."""
        raise NotImplementedError

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the operator to given tensors."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Quantize the input, apply the operator to quantized parameters, quantize the output."""
        prepared = self.prepared_input(input)
        x = self.rounded_input(prepared)
        weight, bias = self.operands(x)
        assert weight is not None
        y = self.add_branch(self.product(x, weight, bias, *args, **kwargs), prepared)
        return self.quantized_output(y) if self.quantizes_output else y

    def prepared_input(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply an input by the factors of the layer, and rotate it."""
        if self.input_prescale is not None:
            x = x * self.input_prescale.to(x.dtype)
        return x if self.input_rotation is None else rotate(x, self.input_rotation)

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """Prepare and fake-quantize an input."""
        return self.rounded_input(self.prepared_input(x))

    def rounded_input(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize a prepared input."""
        return self.quantize_activation("input_tensors", x) if x.is_floating_point() else x

    def add_branch(self, y: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
        """Add the product of prepared inputs and the low-rank branch to outputs, if there is one.

        Args:
            y: Outputs, (..., outputs).
            prepared: Inputs from ``prepared_input``, (..., inputs).
        """
        down, up = self.low_rank_down, self.low_rank_up
        if down is None or up is None:
            return y
        return y + (prepared @ down.to(prepared.dtype).T @ up.to(prepared.dtype).T).to(y.dtype)

    def prepared_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of a linear layer for prepared inputs, given that for its inputs."""
        if self.input_prescale is not None:
            factors = self.input_prescale.to(weight)
            weight = weight / (factors if self.input_axis else factors.unsqueeze(1))
        rotation = self.input_rotation
        return weight if rotation is None else self.rotated_weight(weight, rotation)

    def weight_with_branch(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of the layer with the low-rank branch added, if there is one."""
        down, up = self.low_rank_down, self.low_rank_up
        if down is None or up is None:
            return weight
        product = up.to(weight) @ down.to(weight)
        return weight + (product if self.input_axis else product.T)

    def merged_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return one weight for the inputs of a linear layer, without factors, rotation and branch.

        Args:
            weight: Weight for prepared inputs, beside the branch.
        """
        weight, rotation = self.weight_with_branch(weight), self.input_rotation
        if rotation is not None:
            if not rotation.is_floating_point():
                rotation = rotation.double() * len(rotation) ** -0.5
            weight = self.rotated_weight(weight, rotation.T)
        if self.input_prescale is not None:
            factors = self.input_prescale.to(weight)
            weight = weight * (factors if self.input_axis else factors.unsqueeze(1))
        return weight

    @property
    def is_merged(self) -> bool:
        """Whether the weight alone takes the inputs of the layer as they are."""
        added = (self.input_rotation, self.input_prescale, self.low_rank_up)
        return all(tensor is None for tensor in added)

    def quantized_output(self, y: torch.Tensor) -> torch.Tensor:
        """Fake-quantize an output."""
        return self.quantize_activation("output_tensors", y)

    def rotated_weight(self, weight: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Return a weight of a linear layer for inputs that are rotated.

        Args:
            weight: (outputs, inputs), or (inputs, outputs) for ``Conv1D``.
            rotation: As ``numerics.hadamard.rotate`` takes it.
        """
        if self.input_axis == 0:
            return rotate(weight.T, rotation).T
        return rotate(weight, rotation)


def is_linear(kind: type[nn.Module]) -> bool:
    """Whether a float operator multiplies the last axis of its input by a matrix."""
    return operator_class(kind) is nn.Linear or input_axis(kind) == 0


def input_axis(kind: type[nn.Module]) -> int:
    """Return the axis of the inputs in the weight of a float operator.

    It is 1 for ``nn.Linear``, whose weight is (outputs, inputs), and 0 for ``Conv1D`` of
    Transformers, a linear layer with a weight of (inputs, outputs).
    """
    return 0 if kind.__qualname__ == "Conv1D" else 1


def float_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the float operator that a module is or replaces."""
    if isinstance(module, QuantizedLayer):
        return module.float_class
    return operator_class(type(module))


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module in place, so that every reference to it sees the change.

    Raises:
        ValueError: The ``forward`` of this instance was replaced; the change would not reach it.
    """
    if "_old_forward" in vars(module):  # accelerate keeps it behind the hook of a placed module
        module._old_forward = cls.forward.__get__(module)
    elif "forward" in vars(module):
        raise ValueError(
            f"The forward of a {type(module).__name__} was replaced by "
            f"{module.forward!r}: undo that before quantizing, or exclude the layer."
        )
    module.__class__ = cls


def activation_shape(layer: nn.Module, name: str, scheme: Scheme) -> tuple[int, ...]:
    """Return the shape of inputs or outputs, as far as the shape of their scales depends on it.

    The shape is () unless scales are per channel or per head. Then it has the number of channels
    along the axis of the scales, and 0 elsewhere: (0, 64) for 64 channels along axis 1.

    Args:
        layer: An operator.
        name: ``input_tensors`` or ``output_tensors``.
        scheme: Quantization scheme of the tensor.

    Raises:
        ValueError: Scales are per channel or head, and the number of channels is not known.
    """
    by_channel = scheme.qscheme in (QSchemeType.per_channel, QSchemeType.per_head)
    if not by_channel or scheme.per_token:
        return ()
    axis = scheme.axis
    shape = [0] * (axis + 1 if axis >= 0 else -axis)
    channels = channel_count(layer, name)
    if channels is None:
        raise ValueError(
            f"{name}: the number of channels of a {type(layer).__name__} is not known, so it takes "
            "no static scales per channel or head. Use one scale per tensor."
        )
    shape[axis] = channels
    return tuple(shape)


def check_channel_axis(tensor: str, spec: QuantizationSpec, axes: int | None = None) -> None:
    """Check that static scales per channel do not belong to the samples of a batch.

    Args:
        tensor: Name of the inputs or outputs, for the message.
        spec: Their specification.
        axes: Number of their axes; None if it is not known yet.

    Raises:
        ValueError: ``ch_axis`` is the first axis, which has the samples.
    """
    if spec.qscheme is not QSchemeType.per_channel or spec.is_dynamic:
        return
    axis = spec.ch_axis or 0
    if axis == 0 or (axes is not None and axis == -axes):
        raise ValueError(
            f"{tensor}: static scales per channel along ch_axis={axis} would belong to the samples "
            "of a batch. Give the axis of the channels (-1 for linear layers, 1 for "
            "convolutions), or set is_dynamic=True for a scale for each token."
        )


def channel_count(layer: nn.Module, name: str) -> int | None:
    """Return the number of channels of the inputs or outputs of an operator, None if unknown.

    Args:
        layer: An operator.
        name: ``input_tensors`` or ``output_tensors``.
    """
    return next((getattr(layer, n) for n in _CHANNELS[name] if hasattr(layer, n)), None)
