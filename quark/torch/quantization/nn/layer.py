"""What every quantized operator shares: quantizers around its own product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.hadamard import rotate
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.nn.quantizer import State, TensorQuantizer

# Tensor of the configuration -> name of its quantizer.
QUANTIZERS = {
    "weight": "_weight_quantizer",
    "bias": "_bias_quantizer",
    "input_tensors": "_input_quantizer",
    "output_tensors": "_output_quantizer",
}
PARAMETERS = ("weight", "bias")


# Tensor of the configuration -> what operators call the number of its channels.
_CHANNELS = {
    "input_tensors": ("in_features", "in_channels", "nx"),
    "output_tensors": ("out_features", "out_channels", "nf", "embedding_dim"),
}


def is_transposed(kind: type[nn.Module]) -> bool:
    """Whether the weight of an operator has its inputs along axis 0: Transformers' Conv1D."""
    return kind.__qualname__ == "Conv1D"


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module in place, so that every name it goes by sees the change.

    Raises:
        ValueError: The forward of this very module was replaced, which the change would not reach.
    """
    if "_old_forward" in vars(module):  # kept by accelerate behind the hook of a placed module
        module._old_forward = cls.forward.__get__(module)
    elif "forward" in vars(module):
        raise ValueError(
            f"The forward of a {type(module).__name__} was replaced by "
            f"{module.forward!r}: undo that before quantizing, or exclude the layer."
        )
    module.__class__ = cls


def activation_shape(layer: nn.Module, name: str, scheme: Scheme) -> tuple[int, ...]:
    """Return the shape of inputs or outputs as far as scales need it.

    That is () unless they are per channel: then the channels along their axis, and 0 elsewhere.

    Args:
        layer: An operator.
        name: ``input_tensors`` or ``output_tensors``.
        scheme: How these are quantized.
    """
    if scheme.qscheme is not QSchemeType.per_channel or scheme.per_token:
        return ()
    axis = scheme.axis
    shape = [0] * (axis + 1 if axis >= 0 else -axis)
    shape[axis] = next(getattr(layer, n) for n in _CHANNELS[name] if hasattr(layer, n))
    return tuple(shape)


class QuantMixin(nn.Module):
    """A module whose input, weight, bias and output are quantized by their own specifications.

    Mixed into an operator of torch, which keeps its parameters: quantizing a module changes its
    class and adds quantizers to it, so every name it goes by sees the change.

    Attributes:
        quant_config: Configuration of the layer.
        frozen: Whether weight and bias already hold quantized values.
        input_rotation: Rotation of the input before it is quantized, undone by the weight: (n, n)
            int8 +-1 or an orthogonal matrix, for each n inputs; or None.
        quantizes_output: Whether the output is quantized here. If not, attention does it later.
    """

    quant_config: QuantizationConfig
    frozen: bool
    input_rotation: torch.Tensor | None
    quantizes_output = True
    weight: Any
    bias: Any
    float_class: type[nn.Module]

    @classmethod
    def from_float(cls, module: nn.Module, config: QuantizationConfig) -> QuantMixin:
        """Turn ``module`` into a quantized one in place and return it."""
        kind = type(module)
        become(module, cls)
        assert isinstance(module, QuantMixin)
        module.float_class = kind
        module.quant_config = config
        module.frozen = False
        module.register_buffer("input_rotation", None)
        for name, attribute in QUANTIZERS.items():
            spec = getattr(config, name)
            if spec is None or (name == "bias" and getattr(module, "bias", None) is None):
                module.add_module(attribute, None)
                continue
            used = spec.for_parameter(is_transposed(kind)) if name in PARAMETERS else spec
            module.add_module(attribute, TensorQuantizer(used))
        return module

    def to_float(self) -> nn.Module:
        """Turn the module back into what ``from_float`` was given and return it."""
        if self.input_rotation is not None:
            self._rotate_weight(self.input_rotation.T.contiguous())
        become(self, self.float_class)
        for attribute in QUANTIZERS.values():
            delattr(self, attribute)
        del self.float_class, self.quant_config, self.frozen, self.input_rotation
        return self

    @property
    def is_linear(self) -> bool:
        """Whether outputs are the product of a matrix and the last axis of inputs."""
        return issubclass(self.float_class, nn.Linear) or is_transposed(self.float_class)

    @property
    def input_width(self) -> int:
        """Number of inputs of a linear layer."""
        return int(self.weight.shape[0 if is_transposed(self.float_class) else 1])

    @property
    def output_width(self) -> int:
        """Number of outputs of a linear layer."""
        return int(self.weight.shape[1 if is_transposed(self.float_class) else 0])

    def rotate_input(self, rotation: torch.Tensor) -> None:
        """Rotate every input from now on, and the weight once, so that the product is the same.

        Args:
            rotation: (n, n) as ``numerics.hadamard.rotate`` takes it; n divides the inputs.

        Raises:
            ValueError: The layer is no linear one, its inputs are rotated already, or n does not
                divide them.
        """
        if not self.is_linear or self.input_rotation is not None:
            raise ValueError(
                f"The input of a {type(self).__name__} cannot be rotated: only those of linear "
                "layers can, once."
            )
        self._rotate_weight(rotation)
        self.input_rotation = rotation.to(self.weight.device)

    @torch.no_grad()
    def _rotate_weight(self, rotation: torch.Tensor) -> None:
        turned = self.weight.T if is_transposed(self.float_class) else self.weight
        turned.copy_(rotate(turned.double(), rotation.to(self.weight.device)))

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
        """Return the quantizers there are, by tensor of the configuration."""
        found = {name: self._modules[attribute] for name, attribute in QUANTIZERS.items()}
        return {name: q for name, q in found.items() if isinstance(q, TensorQuantizer)}

    def parameter_quantizers(self) -> dict[str, TensorQuantizer]:
        """Return the quantizers of weight and bias."""
        return {name: q for name, q in self.quantizers().items() if name in PARAMETERS}

    def value(self, name: str) -> torch.Tensor | None:
        """Return the quantized values of the weight or the bias, or None."""
        x: torch.Tensor | None = getattr(self, name, None)
        if x is None or self.frozen:
            return x
        return _quantized(self.quantizers().get(name), x)

    def state(self, name: str) -> State | None:
        """Return a tensor of the configuration in full, or None if it is not quantized."""
        quantizer = self.quantizers().get(name)
        if quantizer is None:
            return None
        value = getattr(self, name).detach() if name in PARAMETERS else None
        return quantizer.state(value, self.frozen)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the operator to given tensors."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Quantize the input, apply the operator to quantized parameters, quantize the output."""
        weight = self.value("weight")
        assert weight is not None
        y = self.product(self.quantized_input(input), weight, self.value("bias"), *args, **kwargs)
        return self.quantized_output(y) if self.quantizes_output else y

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate and quantize an input: what the weight is multiplied with."""
        if self.input_rotation is not None:
            x = rotate(x, self.input_rotation)
        return _quantized(self.input_quantizer, x) if x.is_floating_point() else x

    def quantized_output(self, y: torch.Tensor) -> torch.Tensor:
        """Quantize the output."""
        return _quantized(self.output_quantizer, y)


def _quantized(quantizer: TensorQuantizer | None, x: torch.Tensor) -> torch.Tensor:
    if quantizer is None:
        return x
    result: torch.Tensor = quantizer(x)
    return result
