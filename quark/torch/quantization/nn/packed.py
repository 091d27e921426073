"""Operators that hold packed weights in the layout of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.layer import PARAMETERS, QuantizedLayer, change_class
from quark.torch.quantization.nn.quantizer import PARTS, QuantizedTensor

SHORT_NAMES = {
    "weight": "weight",
    "bias": "bias",
    "input_tensors": "input",
    "output_tensors": "output",
}


_LAYER_PARTS = (*PARTS[2:], "groups")  # parts that are buffers of the layer
Layer = TypeVar("Layer", bound="PackedLayer")
StoredParts = dict[str, torch.Tensor]
DeclaredParts = dict[str, tuple[tuple[int, ...], torch.dtype]]


class TensorLayout(Protocol):
    """Layout of a quantized tensor in a checkpoint.

    The names of stored parts are "" for codes or values, those in ``PARTS``, and ``groups`` for the
    group of each input, if inputs are not in the order of groups.
    """

    def declare(
        self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool
    ) -> DeclaredParts:
        """Return shape and type of each part stored for a tensor of shape ``shape``.

        ``is_stored`` is False for activations, of which only scales are stored. Without the part
        "", the values are stored as in a float model.
        """
        ...

    def pack(self, state: QuantizedTensor, value: torch.Tensor | None) -> StoredParts:
        """Return the stored parts of a tensor; ``value`` has its quantized values."""
        ...

    def unpack(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: StoredParts
    ) -> QuantizedTensor:
        """Return the unpacked tensor: the inverse of ``pack``."""
        ...

    def value(
        self,
        spec: QuantizationSpec,
        shape: tuple[int, ...],
        stored: StoredParts,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the quantized values in ``dtype``, in the order of the inputs."""
        return self.unpack(spec, shape, stored).value(dtype)


class PackedQuantizer(nn.Module):
    """Scale and zero point of one tensor, in the shape and type of the checkpoint."""

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(
        self, spec: QuantizationSpec, stored: DeclaredParts, device: torch.device | None
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


def _empty(stored: DeclaredParts, name: str, device: torch.device | None) -> torch.Tensor | None:
    if name not in stored:
        return None
    shape, dtype = stored[name]
    return torch.empty(shape, dtype=dtype, device=device)


class PackedLayer(QuantizedLayer):
    """An operator that holds its weight as a checkpoint stores it and unpacks it for each use.

    Attributes:
        weight: Packed codes, or values if the configuration does not quantize the weight.
        weight_quantizer: Scale and zero point of the weight as stored, or None; likewise
            ``bias_quantizer``, ``input_quantizer`` and ``output_quantizer``.
        weight_scale_2: Tensor scale, or scale of a second stage, or None; likewise
            ``weight_zero_point_2`` and the same for the other tensors.
        weight_groups: Group of each input, or None if inputs are in the order of groups.
        layout: How the stored tensors lie.
        shapes: Shapes of the unpacked weight and bias.
    """

    frozen = True
    weight_groups: torch.Tensor | None
    layout: TensorLayout
    shapes: dict[str, tuple[int, ...]]
    _value_dtype: torch.dtype
    _finish: Callable[[Any], None] | None = None

    @classmethod
    def from_module(
        cls: type[Layer], module: nn.Module, config: QuantizationConfig, layout: TensorLayout
    ) -> Layer:
        """Replace a float operator in place by one that stored tensors are loaded into.

        Its values are dropped: parameters and buffers are empty, on the device of the operator.
        """
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        change_class(module, cls)
        assert isinstance(module, cls)
        module.quant_config, module.layout = config, layout
        module._value_dtype = weight.dtype
        parameters = {name: getattr(module, name, None) for name in PARAMETERS}
        module.shapes = {n: tuple(p.shape) for n, p in parameters.items() if p is not None}
        module.register_buffer("input_rotation", None)
        for name in SHORT_NAMES:
            module._declare(name, weight.device)
        return module

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the layer before it was packed."""
        return self._value_dtype

    def finish_load_with(self, finish: Callable[[Any], None]) -> None:
        """Call ``finish`` with this layer when a loader that is not ours has loaded it, once.

        Loaders set the mode of a model last (``model.eval()``), so ``train`` makes the call.
        """
        self._finish = finish

    def train(self: Layer, mode: bool = True) -> Layer:
        """Set the mode, and finish a load."""
        is_loaded = not getattr(self.weight, "is_meta", False)
        if self._finish is not None and is_loaded:
            finish, self._finish = self._finish, None
            finish(self)
        return super().train(mode)

    def declare_rotation(self, size: int | None, dtype: torch.dtype) -> None:
        """Add an empty rotation of ``size`` inputs, by default all, for a stored one."""
        size = size or self.input_width
        self.input_rotation = torch.empty(size, size, dtype=dtype, device=self.weight.device)

    def _declare(self, name: str, device: torch.device) -> None:
        short, spec = SHORT_NAMES[name], getattr(self.quant_config, name)
        is_stored = name in PARAMETERS
        stored: DeclaredParts = {}
        if spec is None or (is_stored and name not in self.shapes):
            self.add_module(f"{short}_quantizer", None)
        else:
            spec = spec.for_parameter(self.input_axis == 0) if is_stored else spec
            stored = self.layout.declare(spec, self.shape(name), is_stored)
            self.add_module(f"{short}_quantizer", PackedQuantizer(spec, stored, device))
        for part in _LAYER_PARTS:
            self.register_buffer(f"{short}_{part}", _empty(stored, part, device))
        if "" in stored:
            empty = _empty(stored, "", device)
            setattr(self, name, nn.Parameter(empty, requires_grad=False))  # type: ignore[arg-type]

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of ``weight`` or ``bias``, unpacked."""
        return self.shapes[name]

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the values of the weight or the bias, or None."""
        stored: torch.Tensor | None = getattr(self, name, None)
        if stored is None:
            return None
        quantizer = self._quantizer(name)
        dtype = dtype or self.value_dtype
        if quantizer is None:
            return stored.to(dtype)
        parts = self._parts(name, quantizer)
        return self.layout.value(quantizer.spec, self.shapes[name], parts, dtype)

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """Return codes and scales of a tensor of the configuration; None if it is in float."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return None
        parts = self._parts(name, quantizer)
        return self.layout.unpack(quantizer.spec, self.shape(name), parts)

    def _quantizer(self, name: str) -> PackedQuantizer | None:
        quantizer: PackedQuantizer | None = getattr(self, f"{SHORT_NAMES[name]}_quantizer")
        return quantizer

    def _parts(self, name: str, quantizer: PackedQuantizer) -> StoredParts:
        parts = {part: getattr(quantizer, part) for part in PARTS[:2]}
        parts |= {part: getattr(self, f"{SHORT_NAMES[name]}_{part}") for part in _LAYER_PARTS}
        if name in PARAMETERS:
            parts[""] = getattr(self, name)
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def quantize_activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``input_tensors`` or ``output_tensors`` fake-quantized."""
        quantizer, state = self._quantizer(name), self.quantized_tensor(name)
        if quantizer is None or state is None or x.numel() == 0:
            return x
        scheme, scale, zero_point = quantizer.scheme, state.scale, state.zero_point
        if scale is None and scheme.fmt.scaled:
            scale, zero_point = dynamic_qparams(x, scheme, state.scale_2)
        return fake_quantize(x, scale, zero_point, scheme)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the values of weight and bias in the type of ``x``, if that is a float type."""
        dtype = x.dtype if x.is_floating_point() else self.value_dtype
        return self.value("weight", dtype), self.value("bias", dtype)
