"""Packed operators that compute in one of several ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.config.tensor_names import LOW_RANK, PRESCALE
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.quantization.nn.packed_parameter import PackedParameter, is_exporting
from quark.torch.quantization.nn.products import compiled_inputs, native_inputs, triton_inputs
from quark.torch.quantization.nn.products.method import Use
from quark.torch.quantization.nn.products.pair_shifts import with_shifts, without_shifts
from quark.torch.quantization.nn.products.product import PackedProduct, has_bytes, make_product
from quark.torch.quantization.nn.quantizer import QuantizedTensor

RUNTIMES = ("exact", "auto", "fast", "compiled", "unpacked")

# Type of a device -> what fake-quantizes inputs in one pass there, with the bits of ``exact``, the
# best first, and the runtimes that use it.
ONE_PASS = {
    "cpu": [
        (native_inputs.fake_quantize, set(RUNTIMES)),
        (compiled_inputs.fake_quantize, {"compiled"}),
    ],
    "cuda": [(triton_inputs.fake_quantize, {"auto", "fast", "compiled"})],
}


class RuntimeLayer(PackedLayer):
    """A packed operator that computes in one of several ways; see ``set_runtime``.

    A layer with a product holds its weight once, as the product does. The codes of the checkpoint
    are made of it where they are read: in state dicts, exports and copies.

    Attributes:
        runtime: How the layer computes.
        packed_product: Product of inputs and the weight; None if the weight is unpacked as a whole.
    """

    runtime: str = "exact"
    packed_product: PackedProduct | None = None
    _values: dict[str, torch.Tensor] | None = None
    _resumes: bool = False  # whether the runtime is set again after torch has made a graph

    def set_runtime(self, runtime: str) -> None:
        """Choose how the layer computes; without values in memory it stays ``exact``.

        Args:
            runtime: One of ``RUNTIMES``.
        """
        self._use_codes()
        self.runtime = "exact" if self._is_empty() else runtime
        if self.runtime == "exact":
            return
        if runtime == "unpacked":
            values = {name: self.value(name) for name in self.packed}
            self._values = {name: value for name, value in values.items() if value is not None}
        else:
            self._make_product()

    @property
    def product_name(self) -> str:
        """Name of what multiplies inputs by the weight; see ``describe_runtime``."""
        if self.packed_product is None:
            return "unpacked at each use" if self._values is None else "unpacked once"
        return self.packed_product.method.name

    def _is_empty(self) -> bool:
        """Whether the values of the layer are not in memory, or nothing of it is packed."""
        return any((c := self._stored(name)) is None or c.is_meta for name in self.packed)

    def _make_product(self) -> None:
        if "weight" not in self.packed or not self.is_linear:
            return
        self._wrap_codes("weight")  # loaders put bare codes in its place
        given = self.quantized_tensor("weight")
        if given is None or given.codes is None:
            return
        state = given
        if self.input_axis == 0:
            if state.order is not None or state.spec.quantizes_codes or state.scheme.block:
                return
            state = state.transposed
        elif self.input_axis:
            state = without_shifts(state)

        def values() -> torch.Tensor:
            values = given.value(torch.float32)
            return values if self.input_axis else values.T

        product = make_product(state, values, self._use)
        stored = self._stored("weight")
        if product is None or stored is None:
            return
        self.packed_product = product
        codes = state.last_stage.codes  # those of the product, which has been proved
        if codes is not None and has_bytes(self._restored(codes, given), stored):
            parameter: Any = self._parameters["weight"]
            parameter.drop_codes()
            del self._codes["weight"]
        else:
            self.packed_product = None  # codes that cannot be restored stay, and are unpacked

    @property
    def _use(self) -> Use:
        """How this layer uses the product of its weight."""
        quantizer, compiles = self._quantizer("input_tensors"), self.runtime == "compiled"
        inputs, scale = None, None
        if quantizer is not None:
            inputs, (scale, _, _) = quantizer.scheme, self._scales("input_tensors", quantizer)
        return Use(self.value_dtype, inputs, scale, compiles or self.runtime == "fast", compiles)

    def _codes_of(self, product: PackedProduct) -> torch.Tensor:
        """Return the codes of the weight as the checkpoint stores them."""
        quantizer, shape = self._quantizer("weight"), self.shapes["weight"]
        assert quantizer is not None
        parts = self._scale_parts("weight", quantizer)
        declared, dtype = self.layout.declare(quantizer.spec, shape, True)[""]
        device = product.parts["scale"].device
        blank = torch.zeros(declared, dtype=dtype, device=device)  # scales alone are read
        state = self.layout.unpack(quantizer.spec, shape, {**parts, "": blank})
        return self._restored(product.codes(), state)

    def _restored(self, codes: torch.Tensor, state: QuantizedTensor) -> torch.Tensor:
        """Return the codes of a product as the checkpoint stores them.

        Args:
            codes: Codes of the product.
            state: Scales and shape of the weight as the checkpoint has them.
        """
        codes = with_shifts(codes, state) if self.input_axis else codes.T.contiguous()
        return self.layout.pack(state._replace(codes=codes), None)[""]

    def _use_codes(self) -> None:
        """Hold the codes of the checkpoint again, and compute with them."""
        self._values = None
        if self.packed_product is not None:
            codes = self.stored_codes("weight")
            self.packed_product = None
            self._parameters["weight"] = codes  # type: ignore[assignment]
            self._wrap_codes("weight")

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Quantize the input, apply the operator to quantized parameters, quantize the output."""
        if self._resumes and not torch.compiler.is_compiling():
            self._resumes = False
            self.set_runtime(self.runtime)
        product = self.packed_product
        needs_gradient = input.requires_grad and torch.is_grad_enabled()
        if product is None or needs_gradient or not input.is_floating_point():
            return super().forward(input, *args, **kwargs)
        if self._only_multiplies:
            return product.multiply(input)
        prepared = self.prepared_input(input)
        x = prepared if product.method.quantizes_inputs else self.rounded_input(prepared)
        y = product.multiply(x)
        bias = self.value("bias", y.dtype)
        y = self.add_branch(y if bias is None else y + bias, prepared)
        return self.quantized_output(y) if self.quantizes_output else y

    @property
    def _only_multiplies(self) -> bool:
        """Whether the output is the product of the input and the weight, with nothing around it.

        Attributes of modules take microseconds, as much as all that a product does for one token.
        """
        held, quantizers, (down, _) = self._parameters, self._modules, LOW_RANK
        is_bare = held.get("bias") is None and held[PRESCALE] is None and held[down] is None
        is_float = quantizers["input_quantizer"] is None and quantizers["output_quantizer"] is None
        return is_bare and is_float and self._buffers["input_rotation"] is None

    def quantize_activation(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return ``input_tensors`` or ``output_tensors`` fake-quantized."""
        quantizer = self._quantizer(name)
        if quantizer is None:
            return x
        needs_gradient = x.requires_grad and torch.is_grad_enabled()
        is_traced = torch.compiler.is_compiling()
        if not needs_gradient and not is_traced:
            for in_one_pass, runtimes in ONE_PASS.get(x.device.type, []):
                if self.runtime in runtimes:
                    scales = self._scales(name, quantizer)
                    y = in_one_pass(x, *scales[:2], quantizer.scheme, scales[2])
                    if y is not None:
                        return y
        return super().quantize_activation(name, x)

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the values of the weight or the bias, or None."""
        dtype = dtype or self.value_dtype
        kept = (self._values or {}).get(name)
        if kept is not None and kept.dtype == dtype:
            return kept
        if name == "weight" and self.packed_product is not None:
            values = self.packed_product.values(dtype)
            return values if self.input_axis else values.T
        return super().value(name, dtype)

    # ---- codes in place of the product ----------------------------------------------------------

    def stored_codes(self, name: str) -> torch.Tensor:
        """Return the codes of a parameter that holds none."""
        codes = self._stored(name)
        assert codes is not None
        return codes

    def _stored(self, name: str) -> torch.Tensor | None:
        held = self._parameters.get(name)
        if name != "weight" or self.packed_product is None or not isinstance(held, PackedParameter):
            return super()._stored(name)
        return nn.Parameter(self._codes_of(self.packed_product), requires_grad=False)

    def _wrap_codes(self, name: str) -> None:
        if name == "weight" and self.packed_product is not None:
            if isinstance(self._parameters.get(name), PackedParameter):
                return
            self.packed_product = None  # other codes were put in place
        super()._wrap_codes(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the modules in this one; ``torch.export`` gets the codes of the checkpoint.

        A graph may run in another process, which has no product. The next call sets the runtime
        again.
        """
        if is_exporting() and self.runtime != "exact":
            self._use_codes()
            self._resumes = True
        return super().named_modules(*args, **kwargs)

    def keep_codes(self, name: str, codes: torch.Tensor) -> None:
        """Keep codes for the tracer; if they are others than before, compute with them."""
        if vars(self).get("_codes", {}).get(name) is not codes:
            self._values = None
            self.packed_product = None if name == "weight" else self.packed_product
        super().keep_codes(name, codes)

    @contextmanager
    def _bare_codes(self) -> Iterator[None]:
        runtime = self.runtime
        self._use_codes()
        with super()._bare_codes():
            yield
        self.set_runtime(runtime)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.set_runtime("exact")  # scales are loaded after this
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, with the codes of the checkpoint."""
        own = dict.fromkeys(("packed_product", "_values"))
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled layer."""
        super().__setstate__(state)
        self.set_runtime(self.runtime)
