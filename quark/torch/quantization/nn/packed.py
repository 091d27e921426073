"""Linear layers that hold packed weights, as a checkpoint stores them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.mixin import PARAMETERS, become
from quark.torch.quantization.nn.quantizer import PARTS, State

SHORT_NAMES = {
    "weight": "weight",
    "bias": "bias",
    "input_tensors": "input",
    "output_tensors": "output",
}


Stored = dict[str, torch.Tensor]
Declared = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Layout(Protocol):
    """How a checkpoint stores a quantized tensor.

    The stored parts go by three names: "" for codes or values, "scale" and "zero_point".
    """

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of each part stored for a tensor of shape ``shape``.

        ``is_stored`` is False for activations, of which only scales are kept. Without "" the
        values are stored as in a float model.
        """
        ...

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return the parts of a tensor, given also its quantized values."""
        ...

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return the tensor in full: the inverse of ``pack``."""
        ...

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the quantized values in ``dtype``."""
        ...


class PackedQuantizer(nn.Module):
    """Scale and zero point of one tensor in the shape a checkpoint stores them."""

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(
        self, spec: QuantizationSpec, stored: Declared, device: torch.device | None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scheme: Scheme = spec.scheme
        for name in ("scale", "zero_point"):
            self.register_buffer(name, _empty(stored, name, device))

    def forward(self, x: torch.Tensor, tensor_scale: torch.Tensor | None) -> torch.Tensor:
        """Quantize and dequantize activations, given the scale of their scales if there is one."""
        if x.numel() == 0:
            return x
        if self.scale is None and self.scheme.fmt.scaled:
            return fake_quantize(x, *dynamic_qparams(x, self.scheme, tensor_scale), self.scheme)
        return fake_quantize(x, self.scale, self.zero_point, self.scheme)

    def extra_repr(self) -> str:
        """Return format and granularity."""
        granularity = "" if self.spec.qscheme is None else f", {self.spec.qscheme.name}"
        return f"{self.spec.dtype.name}{granularity}"


def _empty(stored: Declared, name: str, device: torch.device | None) -> torch.Tensor | None:
    if name not in stored:
        return None
    shape, dtype = stored[name]
    return torch.empty(shape, dtype=dtype, device=device)


class QParamsLinear(nn.Linear):
    """A linear layer whose weight is stored in packed codes and unpacked for each product.

    Attributes:
        weight: Packed codes, or values where the configuration leaves the weight alone.
        weight_quantizer: Scale and zero point of the weight as stored, or None; likewise
            ``bias_quantizer``, ``input_quantizer`` and ``output_quantizer``.
        quant_config: Configuration of the layer.
        layout: How the stored tensors lie.
        value_dtype: Type of the layer before it was packed.
    """

    weight_quantizer: PackedQuantizer | None
    bias_quantizer: PackedQuantizer | None
    input_quantizer: PackedQuantizer | None
    output_quantizer: PackedQuantizer | None
    quant_config: QuantizationConfig
    layout: Layout
    value_dtype: torch.dtype

    @classmethod
    def from_module(
        cls, linear: nn.Linear, config: QuantizationConfig, layout: Layout
    ) -> QParamsLinear:
        """Turn a linear layer in place into one ready to take stored tensors, and return it.

        Its values are dropped: parameters and buffers are left empty, on the device they had.
        """
        device = linear.weight.device
        module: nn.Module = linear
        become(module, cls)
        assert isinstance(module, QParamsLinear)
        module.quant_config, module.layout = config, layout
        module.value_dtype = linear.weight.dtype
        for name, short in SHORT_NAMES.items():
            spec = getattr(config, name)
            is_stored = name in PARAMETERS
            if spec is None or (name == "bias" and linear.bias is None):
                module.add_module(f"{short}_quantizer", None)
                continue
            spec = spec.for_parameter() if is_stored else spec
            stored = layout.declare(spec, module.shape_of(name), is_stored)
            module.add_module(f"{short}_quantizer", PackedQuantizer(spec, stored, device))
            if "" in stored:
                shape, kind = stored[""]
                empty = torch.empty(shape, dtype=kind, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        return module

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the weight or the bias in full; [] for activations."""
        return {
            "weight": (self.out_features, self.in_features),
            "bias": (self.out_features,),
        }.get(name, ())

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the weight or the bias in full, or None, in ``dtype`` (by default its own)."""
        stored: torch.Tensor | None = getattr(self, name, None)
        if stored is None:
            return None
        quantizer = self._quantizer(name)
        dtype = dtype or self.value_dtype
        if quantizer is None:
            return stored.to(dtype)
        parts = self._stored(name, quantizer)
        return self.layout.value(quantizer.spec, self.shape_of(name), parts, dtype)

    def state(self, name: str) -> State | None:
        """Return a tensor of the configuration in full, or None if it is not quantized."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return None
        parts = self._stored(name, quantizer)
        return self.layout.unpack(quantizer.spec, self.shape_of(name), parts)

    def _quantizer(self, name: str) -> PackedQuantizer | None:
        found: PackedQuantizer | None = getattr(self, f"{SHORT_NAMES[name]}_quantizer")
        return found

    def _stored(self, name: str, quantizer: PackedQuantizer) -> Stored:
        parts = {"scale": quantizer.scale, "zero_point": quantizer.zero_point}
        if name in PARAMETERS:
            parts[""] = getattr(self, name)
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input, multiply by the unpacked weight, quantize the output."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        weight = self.value("weight", x.dtype)
        assert weight is not None
        y = F.linear(x, weight, self.value("bias", x.dtype))
        return y if self.output_quantizer is None else self.output_quantizer(y)
