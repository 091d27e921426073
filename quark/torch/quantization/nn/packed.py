"""Operators that hold packed weights in the layout of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from quark.torch.numerics.custom_operators import (
    fake_quantize,
    fake_quantize_dynamic,
    with_text,
)
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import (
    GROUPS,
    LOW_RANK,
    PARAMETERS,
    PRESCALE,
    SHORT_NAMES,
)
from quark.torch.quantization.nn.layer import QuantizedLayer, change_class
from quark.torch.quantization.nn.packed_parameter import PackedParameter, is_exporting
from quark.torch.quantization.nn.quantizer import PARTS, QuantizedTensor
from quark.torch.quantization.nn.stored_tensor import (
    StoredTensor,
    read_scales,
    read_values,
    register_stored_tensor,
)
from quark.torch.quantization.nn.tensor_layout import DeclaredParts, StoredParts, TensorLayout
from quark.torch.quantization.nn.typed_buffers import TypedBuffers

_LAYER_PARTS = (*PARTS[2:], GROUPS)  # parts that are buffers of the layer
Layer = TypeVar("Layer", bound="PackedLayer")


class PackedQuantizer(TypedBuffers):
    """Scale and zero point of one tensor, in the shape and type of the checkpoint."""

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(
        self, spec: QuantizationSpec, stored: DeclaredParts, device: torch.device | None
    ) -> None:
        super().__init__()
        self.spec = spec
        self.scheme: Scheme = with_text(spec.scheme)
        self.key = ""
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

    A quantized parameter that is stored as codes is a ``PackedParameter``: its type, shape and
    results are those of the values. The state dict holds the codes, and so does the parameter while
    it is on the meta device, where loaders look up what they have to load.

    Attributes:
        weight: Packed codes, or values if the configuration does not quantize the weight.
        weight_quantizer: Scale and zero point of the weight as stored, or None; likewise
            ``bias_quantizer``, ``input_quantizer`` and ``output_quantizer``.
        weight_scale_2: Tensor scale, or scale of a second stage, or None; likewise
            ``weight_zero_point_2`` and the same for the other tensors.
        weight_groups: Group of each input, or None if inputs are in the order of groups.
        layout: How the stored tensors lie.
        shapes: Shapes of the unpacked weight and bias.
        packed: Names of the parameters that are stored as codes.
    """

    frozen = True
    weight_groups: torch.Tensor | None
    layout: TensorLayout
    shapes: dict[str, tuple[int, ...]]
    packed: frozenset[str] = frozenset()
    _value_dtype: torch.dtype
    _codes: dict[str, torch.Tensor]
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
        for name in (PRESCALE, *LOW_RANK):
            module.register_parameter(name, None)
        for name in SHORT_NAMES:
            module._declare(name, weight.device)
        return module

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the values: that of the layer before it was packed, or converted to since."""
        return self._value_dtype

    @value_dtype.setter
    def value_dtype(self, dtype: torch.dtype) -> None:
        with self._bare_codes():
            self._value_dtype = dtype

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

    def declare_prescale(self) -> None:
        """Add empty factors of the inputs, for stored ones."""
        self._declare_float(PRESCALE, self.input_width)

    def declare_low_rank(self, rank: int) -> None:
        """Add an empty low-rank branch, for a stored one."""
        down, up = LOW_RANK
        self._declare_float(down, rank, self.input_width)
        self._declare_float(up, self.output_width, rank)

    def _declare_float(self, name: str, *shape: int) -> None:
        empty = torch.empty(shape, dtype=self.value_dtype, device=self.weight.device)
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

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
            self._register_stored(name)
        for part in _LAYER_PARTS:
            self.register_buffer(f"{short}_{part}", _empty(stored, part, device))
        if "" in stored:
            self.packed |= {name}
            empty = _empty(stored, "", device)
            setattr(self, name, nn.Parameter(empty, requires_grad=False))  # type: ignore[arg-type]

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of ``weight`` or ``bias``, unpacked."""
        return self.shapes[name]

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the values of the weight or the bias, or None."""
        stored = self._stored(name)
        return None if stored is None else self.unpack_parameter(name, stored, dtype)

    def unpack_parameter(
        self, name: str, stored: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the values of the weight or the bias, given what is stored of it.

        Args:
            name: ``weight`` or ``bias``.
            stored: Its codes, or its values if it is not quantized.
            dtype: Type of the result, ``value_dtype`` by default.
        """
        quantizer, dtype = self._quantizer(name), dtype or self.value_dtype
        if quantizer is None:
            return stored.to(dtype)
        parts = self._parts(name, quantizer) | {"": stored}
        if torch.compiler.is_dynamo_compiling():
            return read_values(parts, quantizer.key, dtype)
        return self.layout.value(quantizer.spec, self.shapes[name], parts, dtype)

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """Return codes and scales of a tensor of the configuration; None if it is in float."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return None
        parts = self._parts(name, quantizer)
        return self.layout.unpack(quantizer.spec, self.shape(name), parts)

    def _stored(self, name: str) -> torch.Tensor | None:
        """Return the weight or bias as stored: codes, or values if it is not quantized."""
        if torch.compiler.is_dynamo_compiling() and name in self.packed:
            return self._codes[name]
        parameter = self._parameters.get(name)
        return parameter.codes if isinstance(parameter, PackedParameter) else parameter

    def _quantizer(self, name: str) -> PackedQuantizer | None:
        # Attributes of modules are found last; a token asks each layer several times.
        return cast("PackedQuantizer | None", self._modules[f"{SHORT_NAMES[name]}_quantizer"])

    def _parts(self, name: str, quantizer: PackedQuantizer) -> StoredParts:
        stored = self._stored(name) if name in PARAMETERS else None
        return self._scale_parts(name, quantizer) | ({} if stored is None else {"": stored})

    def _scale_parts(self, name: str, quantizer: PackedQuantizer) -> StoredParts:
        """Return the stored parts of a tensor but its codes."""
        parts = {part: getattr(quantizer, part) for part in PARTS[:2]}
        parts |= {part: getattr(self, f"{SHORT_NAMES[name]}_{part}") for part in _LAYER_PARTS}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def quantize_activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``input_tensors`` or ``output_tensors`` fake-quantized."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return x
        scheme = quantizer.scheme
        scale, zero_point, scale_2 = self._scales(name, quantizer)
        if scale is None and scheme.fmt.scaled:
            return fake_quantize_dynamic(x, scheme, scale_2)
        return fake_quantize(x, scale, zero_point, scheme)

    def _scales(
        self, name: str, quantizer: PackedQuantizer
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return scale, zero point and tensor scale of inputs or outputs."""
        parts = self._parts(name, quantizer)
        if torch.compiler.is_dynamo_compiling():
            return read_scales(parts, quantizer.key)
        state = self.layout.unpack(quantizer.spec, self.shape(name), parts)
        return state.scale, state.zero_point, state.scale_2

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the values of weight and bias in the type of ``x``, if that is a float type."""
        dtype = x.dtype if x.is_floating_point() else self.value_dtype
        return self.value("weight", dtype), self.value("bias", dtype)

    # ---- codes behind parameters ----------------------------------------------------------------

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add or replace a parameter; one that is stored as codes is wrapped."""
        super().register_parameter(name, param)
        self._wrap_codes(name)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, wrapped even if a library put bare codes in its place.

        While torch traces a model, it is the values, so that the graph has plain tensors alone.
        """
        if name in PARAMETERS and name in self.packed:
            if torch.compiler.is_compiling():
                return self.value(name)
            self._wrap_codes(name)
        return super().__getattr__(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules in this one.

        ``torch.export`` lists parameters with duplicates. It gets bare codes then, which become
        parameters of the graph. They are wrapped again when they are next listed or read.
        """
        lists_duplicates = not kwargs.get("remove_duplicate", True) or (args[2:] == (False,))
        if lists_duplicates and is_exporting():
            for name in self.packed:
                self._parameters[name] = self._stored(name)  # type: ignore[assignment]
        else:
            for name in self.packed:
                self._wrap_codes(name)
        modules: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return modules

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, in which codes are parameters alone."""
        return {name: value for name, value in vars(self).items() if name != "_codes"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self.packed:
            self._wrap_codes(name)
        for name in SHORT_NAMES:
            self._register_stored(name)

    def _register_stored(self, name: str) -> None:
        quantizer = self._quantizer(name)
        if quantizer is not None:
            stored = StoredTensor(self.layout, quantizer.spec, self.shape(name))
            quantizer.key = register_stored_tensor(stored)

    def _wrap_codes(self, name: str) -> None:
        stored: Any = self._parameters.get(name)
        if name not in self.packed or stored is None:
            return
        if not isinstance(stored, PackedParameter):
            if stored.is_meta:
                return
            stored = PackedParameter.wrap(stored, self, name)
            self._parameters[name] = stored
        self.keep_codes(name, stored.codes)

    def keep_codes(self, name: str, codes: torch.Tensor) -> None:
        """Keep the codes of a parameter where the tracer of ``torch.compile`` reads them."""
        vars(self).setdefault("_codes", {})[name] = codes

    @contextmanager
    def _bare_codes(self) -> Iterator[None]:
        """Hold codes in place of wrapped parameters inside of the context."""
        for name in self.packed:
            stored = self._stored(name)
            if stored is not None:
                is_parameter = isinstance(stored, nn.Parameter)
                self._parameters[name] = stored if is_parameter else nn.Parameter(stored, False)  # type: ignore[assignment]
        try:
            yield
        finally:
            for name in self.packed:
                self._wrap_codes(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert or move the layer. Codes and scales keep their type; that of values changes."""
        codes = {n: None if (c := self._stored(n)) is None else c.detach() for n in self.packed}
        with self._bare_codes():
            self._value_dtype = fn(torch.empty(0, dtype=self._value_dtype, device="cpu")).dtype
            super()._apply(fn, recurse)
            for name, before in codes.items():
                after = self._stored(name)
                if before is not None and after is not None and before.dtype != after.dtype:
                    moved = before.to(after.device)
                    self._parameters[name] = nn.Parameter(moved, requires_grad=False)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.packed:
            stored = self._stored(name)
            if stored is not None:
                destination[prefix + name] = stored if keep_vars else stored.detach()

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._bare_codes():
            super()._load_from_state_dict(*args)


def packed_layers(model: nn.Module) -> dict[str, PackedLayer]:
    """Return the packed layers of a model, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedLayer)}
