"""Linear layers that hold packed weights, as a checkpoint stores them."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec

SHORT_NAMES = {
    "weight": "weight",
    "bias": "bias",
    "input_tensors": "input",
    "output_tensors": "output",
}


class Layout(Protocol):
    """How a checkpoint stores a quantized tensor. Tensors go by three names: "" for the codes or
    values themselves, "scale" and "zero_point".
    """

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and type of each tensor stored for a tensor of shape ``shape``.

        ``is_stored`` is False for activations, of which only scales are kept.
        """
        ...

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return codes of shape ``shape``, scale and zero point."""
        ...


class PackedQuantizer(nn.Module):
    """Scale and zero point of one tensor in the shape a checkpoint stores them."""

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(
        self,
        spec: QuantizationSpec,
        stored: dict[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scheme: Scheme = spec.scheme
        for name in ("scale", "zero_point"):
            buffer = None
            if name in stored:
                shape, dtype = stored[name]
                buffer = torch.empty(shape, dtype=dtype, device=device)
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize activations."""
        if x.numel() == 0:
            return x
        if self.scale is None and self.scheme.fmt.scaled:
            return fake_quantize(x, *dynamic_qparams(x, self.scheme), self.scheme)
        return fake_quantize(x, self.scale, self.zero_point, self.scheme)

    def extra_repr(self) -> str:
        """Return format and granularity."""
        granularity = "" if self.spec.qscheme is None else f", {self.spec.qscheme.name}"
        return f"{self.spec.dtype.name}{granularity}"


class QParamsLinear(nn.Linear):
    """A linear layer whose weight is stored in packed codes and unpacked for each product.

    Attributes:
        weight: Packed codes, or values where the configuration leaves the weight alone.
        weight_quantizer: Scale and zero point of the weight as stored, or None; likewise
            ``bias_quantizer``, ``input_quantizer`` and ``output_quantizer``.
        quant_config: Configuration of the layer.
        fake: Whether ``weight`` and ``bias`` hold quantized values instead of codes.
    """

    weight_quantizer: PackedQuantizer | None
    bias_quantizer: PackedQuantizer | None
    input_quantizer: PackedQuantizer | None
    output_quantizer: PackedQuantizer | None
    quant_config: QuantizationConfig
    layout: Layout
    fake: bool

    @classmethod
    def from_module(
        cls, linear: nn.Linear, config: QuantizationConfig, layout: Layout, fake: bool = False
    ) -> QParamsLinear:
        """Turn a linear layer in place into one ready to take stored tensors, and return it.

        Its values are dropped: parameters and buffers are left empty, on the device they had.
        """
        device = linear.weight.device
        module = linear
        module.__class__ = cls
        assert isinstance(module, QParamsLinear)
        module.quant_config, module.layout, module.fake = config, layout, fake
        shapes = {
            "weight": (linear.out_features, linear.in_features),
            "bias": (linear.out_features,),
        }
        for name, short in SHORT_NAMES.items():
            spec = getattr(config, name)
            is_stored = name in shapes
            if spec is None or (name == "bias" and linear.bias is None):
                module.add_module(f"{short}_quantizer", None)
                continue
            spec = spec.for_parameter() if is_stored else spec
            stored = layout.declare(spec, shapes.get(name, ()), is_stored)
            module.add_module(f"{short}_quantizer", PackedQuantizer(spec, stored, device))
            if is_stored and not fake:
                shape, kind = stored[""]
                empty = torch.empty(shape, dtype=kind, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
        return module

    def value(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the weight or the bias in full, in ``dtype``."""
        stored: torch.Tensor | None = getattr(self, name)
        quantizer: PackedQuantizer | None = getattr(self, f"{name}_quantizer")
        if stored is None or quantizer is None or self.fake:
            return stored if stored is None else stored.to(dtype)
        shape = (self.out_features, self.in_features)[: 2 if name == "weight" else 1]
        tensors = {"": stored, "scale": quantizer.scale, "zero_point": quantizer.zero_point}
        present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        codes, scale, zero_point = self.layout.unpack(quantizer.spec, shape, present)
        return dequantize(codes, scale, zero_point, quantizer.scheme, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize the input, multiply by the unpacked weight, quantize the output."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        weight = self.value("weight", x.dtype)
        assert weight is not None
        y = F.linear(x, weight, self.value("bias", x.dtype))
        return y if self.output_quantizer is None else self.output_quantizer(y)
