"""Operators that hold float parameters and fake-quantize them on use, until they are frozen."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from quark.torch.graph.parameter_writes import write_
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import LOW_RANK, PARAMETERS, PRESCALE
from quark.torch.quantization.nn.layer import (
    QuantizedLayer,
    activation_shape,
    change_class,
    check_channel_axis,
)
from quark.torch.quantization.nn.learned_range import make_quantizer
from quark.torch.quantization.nn.quantizer import QuantizedTensor, TensorQuantizer

Layer = TypeVar("Layer", bound="FakeQuantizedLayer")

# Tensor of the configuration -> name of its quantizer.
QUANTIZERS = {
    "weight": "_weight_quantizer",
    "bias": "_bias_quantizer",
    "input_tensors": "_input_quantizer",
    "output_tensors": "_output_quantizer",
}


class FakeQuantizedLayer(QuantizedLayer):
    """An operator with a ``TensorQuantizer`` for each quantized tensor.

    Parameters are in float. Once the layer is frozen, they hold quantized values.

    Attributes:
        replaced_class: Class of the float module: ``float_class``, or another that computes alike.
        keeps_zeros: Whether the weight was pruned, so that algorithms leave its zeros zero.
    """

    replaced_class: type[nn.Module]
    keeps_zeros: bool

    @classmethod
    def from_float(cls: type[Layer], module: nn.Module, config: QuantizationConfig) -> Layer:
        """Replace a float module in place by a quantized one and return it."""
        replaced = type(module)
        change_class(module, cls)
        assert isinstance(module, cls)
        module.replaced_class = replaced
        module.quant_config = config
        module.frozen = module.keeps_zeros = False
        module.register_buffer("input_rotation", None)
        for name in (PRESCALE, *LOW_RANK):
            module.register_parameter(name, None)
        for name, attribute in QUANTIZERS.items():
            spec = getattr(config, name)
            if spec is None or (name == "bias" and getattr(module, "bias", None) is None):
                module.add_module(attribute, None)
                continue
            used = spec.for_parameter(module.input_axis == 0) if name in PARAMETERS else spec
            quantizer = make_quantizer(
                used, module._scale_shape(name, used), module._scale_device()
            )
            module.add_module(attribute, quantizer)
        return module

    def _scale_shape(self, name: str, spec: QuantizationSpec) -> tuple[int, ...]:
        """Return the shape of the scale of a tensor if it is trained, else ()."""
        if spec.range_training is None:
            return ()
        if name in PARAMETERS:
            return spec.scheme.scale_shape(self.parameter_shape(name))
        return spec.scheme.scale_shape(activation_shape(self, name, spec.scheme))

    def _scale_device(self) -> torch.device:
        """Return the device of scales that are trained: that of the weight, if it has values."""
        device: torch.device = self.weight.device
        return torch.device("cpu") if device.type == "meta" else device

    def end_training(self) -> None:
        """Let quantized parameters and ranges stay as they are: they have their final values."""
        for name in self.parameter_quantizers():
            getattr(self, name).requires_grad_(False)
        for quantizer in self.quantizers().values():
            quantizer.end_training()

    def to_float(self) -> nn.Module:
        """Restore the module that ``from_float`` replaced, in place, and return it."""
        if not self.is_merged:
            with torch.no_grad():
                write_(self.weight, self.merged_weight(self.weight.double()))
        change_class(self, self.replaced_class)
        for attribute in QUANTIZERS.values():
            delattr(self, attribute)
        del self.quant_config, self.frozen, self.keeps_zeros, self.replaced_class
        del self.input_rotation
        del self.input_prescale, self.low_rank_down, self.low_rank_up
        return self

    def add_prescale(self) -> None:
        """Add factors of the inputs, ones for now, if there are none."""
        if self.input_prescale is None:
            self._add_parameter(PRESCALE, self.weight.new_ones(self.input_width))

    @torch.no_grad()
    def prescale_input(self, factors: torch.Tensor) -> None:
        """Multiply every later input by factors, and divide the weight once by them.

        Args:
            factors: (inputs,), positive.

        Raises:
            ValueError: The layer is not linear, or its inputs are multiplied or rotated already.
        """
        if not self.is_linear or not self.is_merged:
            raise ValueError(
                f"The input of a {type(self).__name__} cannot be multiplied by factors: only those "
                "of linear layers can, once, before they are rotated."
            )
        self.add_prescale()
        assert self.input_prescale is not None
        write_(self.input_prescale, factors)
        write_(self.weight, self.prepared_weight(self.weight.double()))

    def add_low_rank(self, rank: int) -> None:
        """Add a low-rank branch that adds zero for now.

        Args:
            rank: Its rank.

        Raises:
            ValueError: The layer is not linear, or has a branch already.
        """
        if not self.is_linear or self.low_rank_up is not None:
            raise ValueError(
                f"A {type(self).__name__} gets no low-rank branch: only linear layers do, once."
            )
        down, up = LOW_RANK
        self._add_parameter(down, self.weight.new_zeros(rank, self.input_width))
        self._add_parameter(up, self.weight.new_zeros(self.output_width, rank))

    def _add_parameter(self, name: str, values: torch.Tensor) -> None:
        """Add a parameter in the type of the weight, which trains if the weight does."""
        weight = self.weight
        self.register_parameter(name, nn.Parameter(values.to(weight), weight.requires_grad))

    def rotate_input(self, rotation: torch.Tensor) -> None:
        """Rotate every later input, and the weight once, so that the product stays the same.

        Args:
            rotation: (n, n) as ``numerics.hadamard.rotate`` takes it; n divides the inputs.

        Raises:
            ValueError: The layer is not linear, its inputs are rotated already, or n does not
                divide the number of inputs.
        """
        if not self.is_linear or self.input_rotation is not None:
            raise ValueError(
                f"The input of a {type(self).__name__} cannot be rotated: only those of linear "
                "layers can, once."
            )
        self._rotate_weight_(rotation)
        self.input_rotation = rotation.to(self.weight.device)

    @torch.no_grad()
    def _rotate_weight_(self, rotation: torch.Tensor) -> None:
        rotation = rotation.to(self.weight.device)
        write_(self.weight, self.rotated_weight(self.weight.double(), rotation))

    @property
    def weight_quantizer(self) -> TensorQuantizer | None:
        """Quantizer of the weight, or None."""
        return self._modules["_weight_quantizer"]  # type: ignore[return-value]

    @property
    def bias_quantizer(self) -> TensorQuantizer | None:
        """Quantizer of the bias, or None."""
        return self._modules["_bias_quantizer"]  # type: ignore[return-value]

    @property
    def input_quantizer(self) -> TensorQuantizer | None:
        """Quantizer of the input, or None."""
        return self._modules["_input_quantizer"]  # type: ignore[return-value]

    @property
    def output_quantizer(self) -> TensorQuantizer | None:
        """Quantizer of the output, or None."""
        return self._modules["_output_quantizer"]  # type: ignore[return-value]

    def quantizers(self) -> dict[str, TensorQuantizer]:
        """Return the quantizers of the layer, by tensor of the configuration."""
        modules = {name: self._modules[attribute] for name, attribute in QUANTIZERS.items()}
        return {name: q for name, q in modules.items() if isinstance(q, TensorQuantizer)}

    def parameter_quantizers(self) -> dict[str, TensorQuantizer]:
        """Return the quantizers of weight and bias."""
        return {name: q for name, q in self.quantizers().items() if name in PARAMETERS}

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the weight."""
        dtype: torch.dtype = self.weight.dtype
        return dtype

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of ``weight`` or ``bias``."""
        return tuple(getattr(self, name).shape)

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the quantized values of the weight or the bias, or None."""
        x: torch.Tensor | None = getattr(self, name, None)
        if x is None:
            return None
        if not self.frozen:
            x = _fake_quantized(self.quantizers().get(name), x)
        return x if dtype is None else x.to(dtype)

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """Return codes and scales of a tensor of the configuration; None if it is in float."""
        quantizer = self.quantizers().get(name)
        if quantizer is None:
            return None
        value = getattr(self, name).detach() if name in PARAMETERS else None
        return quantizer.quantized_tensor(value, self.frozen)

    def quantize_activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``input_tensors`` or ``output_tensors`` fake-quantized, or observe them."""
        quantizer = self.quantizers().get(name)
        if quantizer is not None and quantizer.is_observing:
            check_channel_axis(name, quantizer.spec, x.dim())
        return _fake_quantized(quantizer, x)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the quantized values of weight and bias, in their own type."""
        return self.value("weight"), self.value("bias")


def _fake_quantized(quantizer: TensorQuantizer | None, x: torch.Tensor) -> torch.Tensor:
    if quantizer is None:
        return x
    result: torch.Tensor = quantizer(x)
    return result
