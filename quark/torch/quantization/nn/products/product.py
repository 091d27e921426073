"""The product of an input and a packed weight, chosen for the weight and proved with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from quark.torch.numerics.custom_operators import define_operator
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.quantization.nn.products import compiled, native
from quark.torch.quantization.nn.products.arrangement import Arrangement, Parts
from quark.torch.quantization.nn.products.fast_type import multiplied_type
from quark.torch.quantization.nn.products.kernels import KERNELS, is_proved, takes_zero_points
from quark.torch.quantization.nn.products.method import Kind, Method, Multiplication, Use
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.products.scaled_method import scaled_methods
from quark.torch.quantization.nn.products.triton_method import triton_methods
from quark.torch.quantization.nn.quantizer import QuantizedTensor

FEW_ROWS = (
    32  # rows up to which a kernel is faster than panels, except those of ``Kernel.few_rows``
)
_SMALLEST_GROUP = 8  # below, scales take more memory than codes
_MOST_BITS = 9  # of codes: those of MX9 with the shifts of pairs


@dataclass(frozen=True)
class PanelMethod(Method):
    """Panels that are unpacked one after the other on a CPU; few rows may have a faster way.

    Attributes:
        panels: Order and format of the codes.
        kernel: Device and name of a kernel for few rows, None for panels alone.
        rounds_inputs: Whether the kernel also takes inputs that are not bfloat16, rounded to it.
        decoder: What decodes panels, and multiplies few rows without a kernel: ``panels``
            (operations of torch), ``native`` (numba) or ``compiled`` (Inductor).
    """

    kernel: tuple[str, str] | None
    rounds_inputs: bool
    decoder: str = "panels"

    @property
    def name(self) -> str:
        """Name of the product of few rows; see ``describe_runtime``."""
        return self.kernel[1] if self.kernel else self.decoder

    def multiply_rows(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (rows, inputs) and the codes, (rows, padded outputs)."""
        takes_kernel = self.rounds_inputs or x.dtype == torch.bfloat16
        if self.kernel and takes_kernel and 0 < len(x) <= self._few_rows(x.dtype):
            return KERNELS[self.kernel].multiply(self.panels, parts, x.bfloat16())
        if self.decoder == "native":
            return native.NativeProduct(self.panels, parts).multiply(x)
        product = self._compiled(parts)
        if product is None:
            return self._multiply_panels(parts, x)
        if 0 < len(x) <= compiled.FEW_ROWS:
            return product.multiply(self.panels, parts, x)
        return self._multiply_decoded(product, parts, x)

    def bind_rows(self, parts: Parts) -> Multiplication:
        """Return ``multiply_rows`` for one weight, with all that no input changes done already."""
        if self.decoder == "native" and not self.kernel:
            return native.NativeProduct(self.panels, parts).multiply
        return super().bind_rows(parts)

    def _few_rows(self, dtype: torch.dtype) -> int:
        """Return the rows of inputs in a type up to which the kernel is faster than panels."""
        is_fast = self.decoder == "native" and multiplied_type(dtype) == torch.bfloat16
        return KERNELS[self.kernel].few_rows if self.kernel and is_fast else FEW_ROWS

    def _multiply_panels(self, parts: Parts, x: torch.Tensor) -> torch.Tensor:
        to = self.panels.arrangement
        dtype = multiplied_type(x.dtype)
        x = x.to(dtype)
        y = torch.empty(len(x), to.panels * to.rows, dtype=dtype, device=x.device)
        scales_outputs = to.group == to.inputs and dtype == torch.float32  # one scale per output
        for index, values in enumerate(self.panels.decode(parts, not scales_outputs)):
            columns = y[:, index * to.rows : (index + 1) * to.rows]
            values = values.to(dtype)
            if to.half:  # (2, inputs, half) -> (2, rows, half)
                halves = torch.matmul(x, values.view(2, to.inputs, to.half))
                columns.view(len(x), 2, to.half).copy_(halves.transpose(0, 1))
            elif len(x) == 1:
                torch.mv(values.view(to.rows, to.inputs), x[0], out=columns[0])
            else:
                torch.mm(x, values.view(to.rows, to.inputs).T, out=columns)
        if scales_outputs:
            y *= to.restore_factors(self.panels.scale(parts)).T
        return y

    def _compiled(self, parts: Parts) -> compiled.Compiled | None:
        return compiled.compiled(self.panels, parts) if self.decoder == "compiled" else None

    def _multiply_decoded(
        self, product: compiled.Compiled, parts: Parts, x: torch.Tensor
    ) -> torch.Tensor:
        """Multiply by several panels at a time, which a compiled function decodes."""
        to = self.panels.arrangement
        dtype = multiplied_type(x.dtype)
        x = x.to(dtype)
        y = torch.empty(len(x), to.panels, to.rows, dtype=dtype, device=x.device)
        for chunk, values in product.decode(self.panels, parts):
            runs, count, rows, _ = values.shape
            product_of_chunk = torch.mm(x, values.flatten(0, 2).to(dtype).T)
            columns = y[:, chunk].view(len(x), count, runs, rows)
            columns.copy_(product_of_chunk.view(len(x), runs, count, rows).transpose(1, 2))
        return y.flatten(1)

    def decode(self, parts: Parts) -> torch.Tensor:
        """Return the values of the codes in float32, (outputs, inputs), in their order."""
        to = self.panels.arrangement
        if self.decoder == "native":
            decoded = native.decode(self.panels, parts, torch.float32)
            return torch.cat([values.flatten(0, 1) for _, values in decoded])[: to.outputs]
        return to.restore(torch.stack([panel.clone() for panel in self.panels.decode(parts)]))

    def gives(self, parts: Parts, values: torch.Tensor, use: Use) -> bool:
        """Whether it gives the values of a weight bit for bit, and its products with few rows."""
        if self.decoder == "panels":
            return super().gives(parts, values, use)
        if "unit" in parts or "order" in parts:
            plain = replace(self, decoder="panels")
            if not plain.gives(parts, values, use):
                return False
            values = plain.decode(parts)
        if self.decoder == "native":
            return native.is_right(self.panels, parts, values, use.dtype)
        product = self._compiled(parts)
        return product is not None and compiled.is_right(product, self.panels, parts, values)

    def kind(self, parts: Parts, use: Use) -> Kind | None:
        """Return all that the values of a weight depend on, except its codes and scales."""
        if "unit" in parts or "order" in parts:
            return None
        return self.key, use.dtype, tuple((name, part.dtype) for name, part in parts.items())

    def codes(self, parts: Parts) -> torch.Tensor:
        """Return the codes of the weight, (outputs, inputs), in their order."""
        return self.panels.codes(parts)


class PackedProduct:
    """A packed weight and its method.

    Args:
        method: How it multiplies.
        parts: Its tensors.
    """

    def __init__(self, method: Method, parts: Parts) -> None:
        self.method, self.parts = method, parts
        self._names, self._tensors = ",".join(parts), list(parts.values())
        self._key, self._multiply = method.key, method.bind(parts)
        _METHODS[self._key] = method

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of ``x`` (…, inputs) and the weight: (…, outputs), type of ``x``."""
        if torch.compiler.is_compiling():
            return _packed_product(x, self._tensors, self._names, self._key)
        return self._multiply(x)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of the weight, (outputs, inputs)."""
        if torch.compiler.is_compiling():
            return _packed_values(self._tensors, self._names, self._key, dtype)
        return _cast(self.method.values(self.parts), dtype)

    def codes(self) -> torch.Tensor:
        """Return the codes of the weight, (outputs, inputs), in the order of the groups."""
        return self.method.codes(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(part.nbytes for part in self.parts.values())


_METHODS: dict[str, Method] = {}  # the methods of this process, by their keys
_PROVED: set[Kind] = set()  # the kinds of weights whose values were proved in this process


@define_operator("packed_product(Tensor x, Tensor[] parts, str names, str key) -> Tensor")
def _packed_product(
    x: torch.Tensor, parts: list[torch.Tensor], names: str, key: str
) -> torch.Tensor:
    return _method(key).multiply(dict(zip(names.split(","), parts, strict=True)), x)


@_packed_product.register_fake
def _(x: torch.Tensor, parts: list[torch.Tensor], names: str, key: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _method(key).panels.arrangement.outputs)


@define_operator("packed_values(Tensor[] parts, str names, str key, ScalarType dtype) -> Tensor")
def _packed_values(
    parts: list[torch.Tensor], names: str, key: str, dtype: torch.dtype
) -> torch.Tensor:
    return _cast(_method(key).values(dict(zip(names.split(","), parts, strict=True))), dtype)


@_packed_values.register_fake
def _(parts: list[torch.Tensor], names: str, key: str, dtype: torch.dtype) -> torch.Tensor:
    to = _method(key).panels.arrangement
    return torch.empty(to.outputs, to.inputs, dtype=dtype, device=parts[0].device)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert values as ``qdq.dequantize`` does: those beyond float16 saturate."""
    return (
        values.clamp_(-FLOAT16_MAX, FLOAT16_MAX).half()
        if dtype == torch.float16
        else values.to(dtype)
    )


def _method(key: str) -> Method:
    if key not in _METHODS:
        raise LookupError(
            f"No layer of this process multiplies by the method {key}: another process made the "
            "graph. Load the checkpoint and call set_runtime first."
        )
    return _METHODS[key]


def make_product(
    state: QuantizedTensor, values: Callable[[], torch.Tensor], use: Use
) -> PackedProduct | None:
    """Return the product for a weight, or None if it has to be unpacked as a whole.

    It is proved: its values are the given ones, bit for bit, and so are its codes. What a format
    makes of codes and scales does not depend on the weight: of weights alike (shape, format, types
    of all tensors), the values of the first are proved, and codes and scales of the others.

    Args:
        state: Codes (outputs, inputs) and scales.
        values: Returns their values in float32, in the order of the inputs.
        use: How the layer uses its product.
    """
    unit = state.scale if state.spec.quantizes_codes else None
    state = state.last_stage
    group = _group(state)
    if state.codes is None or not group or (unit is not None and unit.numel() != 1):
        return None
    device = state.codes.device.type
    if device not in METHODS:
        return None
    for method, parts in METHODS[device](state, group, use):
        if state.order is not None:
            parts["order"] = state.order
        if unit is not None:
            parts["unit"] = unit.float().reshape(())
        kind = method.kind(parts, use)
        if not has_bytes(method.codes(parts), state.codes):
            continue
        if kind in _PROVED and method.panels.holds_factors(parts, state):
            return PackedProduct(method, parts)
        if method.gives(parts, values(), use):
            if kind is not None:
                _PROVED.add(kind)
            return PackedProduct(method, parts)
    return None


def has_bytes(x: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of one shape hold the same bytes; eight are compared at a time."""
    if x.shape != expected.shape:
        return False
    own, other = (t.contiguous().view(torch.uint8).flatten() for t in (x, expected))
    if not any(n % 8 for n in (len(own), own.storage_offset(), other.storage_offset())):
        own, other = own.view(torch.int64), other.view(torch.int64)
    return torch.equal(own, other)


def _panel_methods(state: QuantizedTensor, group: int, use: Use) -> Iterator[tuple[Method, Parts]]:
    """Iterate over the methods for a weight, the fastest first, with its tensors."""
    fmt = state.scheme.fmt
    assert state.codes is not None
    outputs, inputs = state.codes.shape
    in_rows = Arrangement.of_rows(outputs, inputs, group, 2 if use.compiles else 1)
    if native.takes_words(fmt, in_rows):
        panels, parts = Panels.pack(state, in_rows)
        if native.serves(panels, parts):
            yield PanelMethod(panels, None, use.rounds_inputs, "native"), parts
    for (device, name), kernel in KERNELS.items():
        size = kernel.group(fmt, inputs, group)
        if size and is_proved(device, name, inputs, size):
            to = Arrangement.of_rows(outputs, inputs, size)
            if kernel.half:
                to = Arrangement.of_columns(outputs, inputs, size, kernel.half)
            panels, parts = Panels.pack(state, to)
            has_zeros = panels.zero_point or "zero_point" in parts
            if takes_zero_points(kernel) or not has_zeros:
                parts["factors"] = kernel.factors(panels, parts)
                yield from _with_decoders(panels, parts, use, (device, name))
                break
    yield from _with_decoders(*Panels.pack(state, in_rows), use)


def _with_decoders(
    panels: Panels, parts: Parts, use: Use, kernel: tuple[str, str] | None = None
) -> Iterator[tuple[Method, Parts]]:
    """Iterate over the methods for panels, those with the fastest decoder first."""
    if native.serves(panels, parts):
        yield PanelMethod(panels, kernel, use.rounds_inputs, "native"), parts
    if use.compiles and not kernel:
        yield PanelMethod(panels, kernel, use.rounds_inputs, "compiled"), parts
    yield PanelMethod(panels, kernel, use.rounds_inputs), parts


def _gpu_methods(state: QuantizedTensor, group: int, use: Use) -> Iterator[tuple[Method, Parts]]:
    """Iterate over the methods for a weight on a GPU, the fastest first, with its tensors."""
    yield from scaled_methods(state, group, use)
    yield from triton_methods(state, group, use)


# Type of a device -> methods for a weight on it. GPUs of AMD are "cuda" too.
METHODS: dict[str, Callable[[QuantizedTensor, int, Use], Iterator[tuple[Method, Parts]]]] = {
    "cpu": _panel_methods,
    "cuda": _gpu_methods,
}


def _group(state: QuantizedTensor) -> int:
    """Return the number of inputs that share a scale, 0 if panels do not take the weight."""
    codes, scheme = state.codes, state.scheme
    if codes is None or codes.dim() != 2 or not codes.numel() or state.scale is None:
        return 0
    is_small = scheme.fmt.bits <= _MOST_BITS and scheme.fmt.exponent_bits <= 5
    if not is_small or scheme.fmt.max_value > FLOAT16_MAX:
        return 0  # floats of a panel are decoded as float16
    rows, columns = scheme.blocks(codes.shape).grid
    inputs = codes.shape[1]
    group = -(-inputs // columns)
    fits = inputs % columns == 0 and group >= min(_SMALLEST_GROUP, inputs)
    return group if fits and codes.shape[0] % rows == 0 else 0
