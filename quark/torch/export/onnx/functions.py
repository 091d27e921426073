"""Inputs and outputs that are rounded: functions of a graph, which its layers call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.onnx.dequantize_linear import BLOCKED_OPSET, FLOAT8_OPSET
from quark.torch.export.onnx.scales import POWERS, dynamic_qparams, on_grid, rounds_scales
from quark.torch.export.onnx.tracing import traced
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.numerics.rounding import RoundType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import State

DOMAIN = "quark"  # of the functions
_INPUT = "x"


def activation_problem(spec: QuantizationSpec) -> str | None:
    """Return why a graph does not quantize inputs or outputs like that, or None."""
    scheme = spec.scheme
    fmt = scheme.fmt
    if not fmt.is_float and fmt.bits > 16:
        return f"cannot compute {spec.dtype.name}"
    if spec.quantizes_codes:
        return "cannot quantize codes a second time"
    if fmt.scaled and scheme.rounding is not RoundType.half_even:
        return f"rounds half to even, not by {scheme.rounding.name}"
    if scheme.block is not None or (
        scheme.qscheme is QSchemeType.per_group and not spec.is_dynamic
    ):
        return f"cannot settle scales {scheme.qscheme.name}"
    if spec.is_dynamic and rounds_scales(scheme) and not scheme.symmetric:
        return "cannot round dynamic scales where it has zero points"
    return None


class Signature(NamedTuple):
    """What tells one function from another.

    Attributes:
        scheme: How values are rounded.
        shape: Sizes of the axes of the values, None for any.
        dtype: Type of the values.
        parts: Shapes of what is settled, by name.
    """

    scheme: Scheme
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, tuple[int, ...]], ...]


class Functions:
    """The functions that a graph calls, each traced once however many layers call it.

    A trace takes time for each operation, and there are dozens in one function.
    """

    def __init__(self) -> None:
        self._names: dict[Signature, str] = {}

    def name(self, signature: Signature) -> str:
        """Return the name of a function."""
        fmt = signature.scheme.fmt.name
        return self._names.setdefault(signature, f"{fmt}_{len(self._names)}")

    def define(self, model: Any, opset: int, folds: bool) -> None:
        """Add the functions to the ``onnx_ir.Model`` that calls them."""
        if not self._names:
            return
        import onnx_ir as ir
        from onnxscript import optimizer

        bodies = [_Body(signature) for signature in self._names]
        args, axes = zip(*(pair for body in bodies for pair in body.examples()), strict=True)
        inputs = [
            [f"{name}.{part}" for part in (_INPUT, *body.parts)]
            for name, body in zip(self._names.values(), bodies, strict=True)
        ]
        names = [name for body in inputs for name in body]
        traces = traced(_Bodies(bodies).eval(), args, axes, opset, names)
        if folds:
            optimizer.fold_constants(traces)
        found = zip(self._names.values(), inputs, traces.graph.outputs, strict=True)
        for name, taken, value in found:
            graph = _as_body(ir.convenience.extract(traces.graph, taken, [value]))
            function = ir.Function(DOMAIN, name, graph=graph, attributes=())
            model.functions[function.identifier()] = function


class Quantized(nn.Module):
    """Quantizes and dequantizes inputs or outputs.

    One static scale and integers of 8 or 16 bits become QuantizeLinear and DequantizeLinear, which
    software turns into integer products. Everything else is a function that computes what
    ``numerics.qdq`` does.

    Args:
        state: Specification, and scale where it is static.
        is_pairable: Whether that pair may stand here.
        functions: Those of the graph.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    tensor_scale: torch.Tensor | None

    def __init__(self, state: State, is_pairable: bool, functions: Functions) -> None:
        super().__init__()
        scheme, scale, zeros = state.scheme, state.scale, state.zero_point
        fmt = scheme.fmt
        per_tensor = scheme.qscheme is QSchemeType.per_tensor
        self.scheme, self.functions = scheme, functions
        is_static = fmt.scaled and not state.spec.is_dynamic
        has_bytes = not fmt.is_float and fmt.bits in (8, 16) and not scheme.float_zero_point
        self.is_pair = is_pairable and is_static and per_tensor and has_bytes
        has_zeros = zeros is not None and not (scheme.symmetric and fmt.signed)
        if is_static:
            assert scale is not None
            zeros = zeros if has_zeros else torch.zeros_like(scale)
        scale = scale.float() if is_static and scale is not None else None
        kept = self.is_pair or (is_static and has_zeros)
        kind = fmt.code_dtype if self.is_pair else torch.float32
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zeros.to(kind) if kept and zeros is not None else None)
        two_level = scheme.scale.two_level and not is_static
        self.register_buffer("tensor_scale", state.scale_2 if two_level else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the quantized values of ``x``, in its type."""
        fmt = self.scheme.fmt
        if not fmt.scaled:
            bound = torch.finfo(fmt.code_dtype).max
            return x.float().clamp(-bound, bound).to(fmt.code_dtype).to(x.dtype)
        if self.is_pair:
            return _rounded(self._paired(x.float()), x.dtype)
        parts = dict(self.named_buffers())
        shapes = tuple((name, tuple(part.shape)) for name, part in parts.items())
        axis = _fixed_axis(self.scheme, "scale" in parts)
        shape = tuple(
            int(n) if axis is not None and i == axis % x.dim() else None
            for i, n in enumerate(x.shape)
        )
        name = self.functions.name(Signature(self.scheme, shape, x.dtype, shapes))
        y: torch.Tensor = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{name}", [x, *parts.values()], dtype=x.dtype, shape=x.shape, version=1
        )
        return y

    @property
    def opset(self) -> int:
        """Lowest opset that has what is written."""
        fmt, scale = self.scheme.fmt, self.scheme.scale.fmt
        if self.is_pair and fmt.bits > 8:
            return BLOCKED_OPSET
        casts = any(f.native is not None and f.bits == 8 for f in (fmt, scale or fmt))
        return FLOAT8_OPSET if casts else 0

    def _paired(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[Any] = [self.scale, self.zero_point]
        kind = self.scheme.fmt.code_dtype
        codes = torch.onnx.ops.symbolic("QuantizeLinear", [x, *parts], dtype=kind, shape=x.shape)
        values: torch.Tensor = torch.onnx.ops.symbolic(
            "DequantizeLinear", [codes, *parts], dtype=torch.float32, shape=x.shape
        )
        return values


class _Bodies(nn.Module):
    """What the functions compute, side by side."""

    def __init__(self, bodies: list[_Body]) -> None:
        super().__init__()
        self.bodies, self.counts = nn.ModuleList(bodies), [len(body.parts) for body in bodies]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what each function returns for its part of the tensors."""
        found, rest = [], iter(tensors)
        for body, count in zip(self.bodies, self.counts, strict=True):
            found.append(body(*itertools.islice(rest, 1 + count)))
        return tuple(found)


class _Body(nn.Module):
    """What a function computes."""

    powers: torch.Tensor

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.scheme, self.signature = signature.scheme, signature
        self.parts = [name for name, _ in signature.parts]
        self.register_buffer("powers", POWERS)

    def examples(self) -> Iterator[tuple[torch.Tensor, dict[int, Any]]]:
        """Iterate over what it takes, and the axes of that which may have any size."""
        shape = self.signature.shape
        sizes = [size or 2 + axis for axis, size in enumerate(shape)]
        free = {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(shape) if size is None}
        yield torch.ones(sizes, dtype=self.signature.dtype), free
        for _, shape in self.signature.parts:
            yield torch.ones(shape), {}

    def forward(self, x: torch.Tensor, *settled: torch.Tensor) -> torch.Tensor:
        """Return the quantized values of ``x``, in its type."""
        fmt, scheme = self.scheme.fmt, self.scheme
        parts = dict(zip(self.parts, settled, strict=True))
        wide, axis, group = x.float(), scheme.axis % x.dim(), fmt.sub_block or scheme.group
        length = x.shape[axis]
        if scheme.qscheme is QSchemeType.per_group and group != -1:
            wide = torch.unflatten(_padded(wide, axis, group), axis, (-1, group))
            axis += 1
        scale, zeros = (self._settled if "scale" in parts else self._own)(wide, axis, parts)
        wide = wide / scale if scheme.divides else wide * scale.reciprocal()
        if fmt.is_float:
            wide = on_grid(wide, fmt)
        elif zeros is None:
            wide = wide.round().clamp(fmt.qmin, fmt.qmax)
        elif scheme.float_zero_point:
            wide = (wide + zeros).round().clamp(fmt.qmin, fmt.qmax) - zeros
        else:
            wide = (wide.round() + zeros).clamp(fmt.qmin, fmt.qmax) - zeros
        wide = wide * scale
        if wide.dim() > x.dim():
            wide = wide.flatten(axis - 1, axis)
            wide = wide if length % group == 0 else wide.narrow(axis - 1, 0, length)
        return _rounded(wide, x.dtype)

    def _settled(
        self, x: torch.Tensor, axis: int, parts: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point so that they broadcast over ``x``."""
        scale, zeros = parts["scale"], parts.get("zero_point")
        if self.scheme.qscheme is QSchemeType.per_channel:
            shape = [-1 if i == axis else 1 for i in range(x.dim())]
            scale = scale.reshape(shape)
            zeros = None if zeros is None else zeros.reshape(shape)
        return scale, zeros

    def _own(
        self, x: torch.Tensor, axis: int, parts: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point of the values of ``x`` itself, so that they broadcast."""
        scheme, where = self.scheme, tuple(range(x.dim()))
        if scheme.qscheme is not QSchemeType.per_tensor:
            where = (-1,) if scheme.per_token else (axis,)
        lo, hi = x.amin(where, keepdim=True), x.amax(where, keepdim=True)
        return dynamic_qparams(lo, hi, axis - 1, scheme, self.powers, parts.get("tensor_scale"))


def _fixed_axis(scheme: Scheme, is_static: bool) -> int | None:
    """Return the axis whose size a function depends on: one of groups or of settled scales."""
    in_groups = scheme.qscheme is QSchemeType.per_group
    by_channel = is_static and scheme.qscheme is QSchemeType.per_channel
    return scheme.axis if in_groups or by_channel else None


def _as_body(graph: Any) -> Any:
    """Make an ``onnx_ir.Graph`` that of a function, in place.

    It has no initializers, and names its axes, which are others than those of the caller, nowhere.
    """
    import onnx_ir as ir

    first = graph[0]
    for value in list(graph.initializers.values()):
        constant = ir.node("Constant", [], {"value": value.const_value})
        graph.insert_before(first, constant)
        value.replace_all_uses_with(constant.outputs[0])
    graph.initializers.clear()
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        value.type = value.shape = None
    return graph


def _padded(x: torch.Tensor, axis: int, group: int) -> torch.Tensor:
    """Return ``x`` with zeros at the end of an axis, up to whole groups."""
    missing = -x.shape[axis] % group
    return F.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, missing)) if missing else x


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float32 values to the type of the layer; float16 saturates."""
    if dtype == torch.float16:
        x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return x.to(dtype)
