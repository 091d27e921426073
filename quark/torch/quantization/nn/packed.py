"""Operators that hold packed weights, as a checkpoint stores them."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from quark.torch.numerics.hadamard import rotate
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.layer import PARAMETERS, activation_shape, become, is_transposed
from quark.torch.quantization.nn.quantizer import PARTS, State

SHORT_NAMES = {
    "weight": "weight",
    "bias": "bias",
    "input_tensors": "input",
    "output_tensors": "output",
}


_BESIDE = (*PARTS[2:], "groups")  # parts that the layer itself holds
Stored = dict[str, torch.Tensor]
Declared = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Layout(Protocol):
    """How a checkpoint stores a quantized tensor.

    The stored parts go by these names: "" for codes or values, those of ``PARTS``, and ``groups``
    for the group of each input, where inputs are not in the order of groups.
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

    def extra_repr(self) -> str:
        """Return format and granularity."""
        granularity = "" if self.spec.qscheme is None else f", {self.spec.qscheme.name}"
        return f"{self.spec.dtype.name}{granularity}"


def _empty(stored: Declared, name: str, device: torch.device | None) -> torch.Tensor | None:
    if name not in stored:
        return None
    shape, dtype = stored[name]
    return torch.empty(shape, dtype=dtype, device=device)


class PackedMixin(nn.Module):
    """An operator whose weight is stored in packed codes and unpacked for each use.

    Attributes:
        weight: Packed codes, or values where the configuration leaves the weight alone.
        weight_quantizer: Scale and zero point of the weight as stored, or None; likewise
            ``bias_quantizer``, ``input_quantizer`` and ``output_quantizer``.
        weight_scale_2: Scale of the scales or of a second stage, or None; likewise
            ``weight_zero_point_2`` and those of the other tensors.
        weight_groups: Group of each input, or None where they are in order.
        quant_config: Configuration of the layer.
        layout: How the stored tensors lie.
        shapes: Shapes of weight and bias in full.
        value_dtype: Type of the layer before it was packed.
        input_rotation: Rotation of the input before it is quantized: (n, n) for each n inputs; or
            None.
        quantizes_output: Whether the output is quantized here. If not, attention does it later.
    """

    float_class: ClassVar[type[nn.Module]]
    weight: Any
    bias: Any
    weight_groups: torch.Tensor | None
    quant_config: QuantizationConfig
    layout: Layout
    shapes: dict[str, tuple[int, ...]]
    value_dtype: torch.dtype
    input_rotation: torch.Tensor | None
    quantizes_output = True

    @classmethod
    def from_module(
        cls, module: nn.Module, config: QuantizationConfig, layout: Layout
    ) -> PackedMixin:
        """Turn an operator in place into one ready to take stored tensors, and return it.

        Its values are dropped: parameters and buffers are left empty, on the device they had.
        """
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        become(module, cls)
        assert isinstance(module, PackedMixin)
        module.quant_config, module.layout = config, layout
        module.value_dtype = weight.dtype
        parameters = {name: getattr(module, name, None) for name in PARAMETERS}
        module.shapes = {n: tuple(p.shape) for n, p in parameters.items() if p is not None}
        module.register_buffer("input_rotation", None)
        for name in SHORT_NAMES:
            module._declare(name, weight.device)
        return module

    @property
    def output_width(self) -> int:
        """Number of outputs of a linear layer."""
        return self.shapes["weight"][1 if is_transposed(self.float_class) else 0]

    def declare_rotation(self, size: int | None, dtype: torch.dtype) -> None:
        """Make room for a stored rotation of ``size`` inputs, by default all of them."""
        size = size or self.shapes["weight"][0 if is_transposed(self.float_class) else 1]
        self.input_rotation = torch.empty(size, size, dtype=dtype, device=self.weight.device)

    def _declare(self, name: str, device: torch.device) -> None:
        short, spec = SHORT_NAMES[name], getattr(self.quant_config, name)
        is_stored = name in PARAMETERS
        stored: Declared = {}
        if spec is None or (is_stored and name not in self.shapes):
            self.add_module(f"{short}_quantizer", None)
        else:
            spec = spec.for_parameter(is_transposed(self.float_class)) if is_stored else spec
            stored = self.layout.declare(spec, self._shape(name, spec.scheme), is_stored)
            self.add_module(f"{short}_quantizer", PackedQuantizer(spec, stored, device))
        for part in _BESIDE:
            self.register_buffer(f"{short}_{part}", _empty(stored, part, device))
        if "" in stored:
            empty = _empty(stored, "", device)
            setattr(self, name, nn.Parameter(empty, requires_grad=False))  # type: ignore[arg-type]

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
        return self.layout.value(quantizer.spec, self.shapes[name], parts, dtype)

    def state(self, name: str) -> State | None:
        """Return a tensor of the configuration in full, or None if it is not quantized."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return None
        parts = self._stored(name, quantizer)
        return self.layout.unpack(quantizer.spec, self._shape(name, quantizer.scheme), parts)

    def _shape(self, name: str, scheme: Scheme) -> tuple[int, ...]:
        if name in PARAMETERS:
            return self.shapes[name]
        return activation_shape(self, name, scheme)

    def _quantizer(self, name: str) -> PackedQuantizer | None:
        found: PackedQuantizer | None = getattr(self, f"{SHORT_NAMES[name]}_quantizer")
        return found

    def _stored(self, name: str, quantizer: PackedQuantizer) -> Stored:
        parts = {part: getattr(quantizer, part) for part in PARTS[:2]}
        parts |= {part: getattr(self, f"{SHORT_NAMES[name]}_{part}") for part in _BESIDE}
        if name in PARAMETERS:
            parts[""] = getattr(self, name)
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the operator to given tensors."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Quantize the input, apply the operator to the unpacked weight, quantize the output."""
        x = self.quantized_input(input)
        dtype = x.dtype if x.is_floating_point() else self.value_dtype
        weight, bias = self.value("weight", dtype), self.value("bias", dtype)
        assert weight is not None
        y = self.product(x, weight, bias, *args, **kwargs)
        return self.quantized_output(y) if self.quantizes_output else y

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate and quantize an input: what the weight is multiplied with."""
        if self.input_rotation is not None:
            x = rotate(x, self.input_rotation)
        return self._rounded("input_tensors", x) if x.is_floating_point() else x

    def quantized_output(self, y: torch.Tensor) -> torch.Tensor:
        """Quantize the output."""
        return self._rounded("output_tensors", y)

    def _rounded(self, name: str, x: torch.Tensor) -> torch.Tensor:
        quantizer, state = self._quantizer(name), self.state(name)
        if quantizer is None or state is None or x.numel() == 0:
            return x
        scheme, scale, zero_point = quantizer.scheme, state.scale, state.zero_point
        if scale is None and scheme.fmt.scaled:
            scale, zero_point = dynamic_qparams(x, scheme, state.scale_2)
        return fake_quantize(x, scale, zero_point, scheme)
