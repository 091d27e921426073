"""Functions of an ONNX graph that quantize and dequantize inputs and outputs of layers.

Each function is traced once, however many layers call it: a trace takes time for each operation,
and a function has dozens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.export.onnx.scales import POWERS, activation_qparams, round_to_float
from quark.torch.export.onnx.tracing import trace_module
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.numerics.scheme import Scheme

DOMAIN = "quark"  # of the functions
_INPUT = "x"


class FunctionSignature(NamedTuple):
    """The properties by which one function differs from another.

    Attributes:
        scheme: How values are quantized.
        shape: Sizes of the axes of the values, None for any.
        dtype: Type of the values.
        parts: Shapes of static scales and zero points, by name.
    """

    scheme: Scheme
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    parts: tuple[tuple[str, tuple[int, ...]], ...]


class FunctionTable:
    """The functions that a graph calls."""

    def __init__(self) -> None:
        self._names: dict[FunctionSignature, str] = {}

    def name(self, signature: FunctionSignature) -> str:
        """Return the name of a function, such as fp4_0. A new signature is added."""
        fmt = signature.scheme.fmt.name
        return self._names.setdefault(signature, f"{fmt}_{len(self._names)}")

    def define(self, model: Any, opset: int, folds: bool) -> None:
        """Trace the functions and add them to the ``onnx_ir.Model`` that calls them.

        Args:
            model: The model. It is changed.
            opset: Version of the operators.
            folds: Whether constants are folded.
        """
        if not self._names:
            return
        import onnx_ir as ir
        from onnxscript import optimizer

        bodies = [_FunctionBody(signature) for signature in self._names]
        args, axes = zip(*(pair for body in bodies for pair in body.examples()), strict=True)
        inputs = [
            [f"{name}.{part}" for part in (_INPUT, *body.parts)]
            for name, body in zip(self._names.values(), bodies, strict=True)
        ]
        names = [name for body in inputs for name in body]
        traces = trace_module(_AllBodies(bodies).eval(), args, axes, opset, names)
        if folds:
            optimizer.fold_constants(traces)
        for name, body_inputs, output in zip(
            self._names.values(), inputs, traces.graph.outputs, strict=True
        ):
            graph = ir.convenience.extract(traces.graph, body_inputs, [output])
            function = ir.Function(DOMAIN, name, graph=_to_function_body(graph), attributes=())
            model.functions[function.identifier()] = function


def size_axis(scheme: Scheme, is_static: bool) -> int | None:
    """Return the axis whose size a function depends on: of groups or of static scales; or None."""
    in_groups = scheme.qscheme is QSchemeType.per_group
    by_channel = is_static and scheme.qscheme is QSchemeType.per_channel
    return scheme.axis if in_groups or by_channel else None


def to_layer_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float32 values to the type of the layer; float16 saturates."""
    if dtype == torch.float16:
        x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    return x.to(dtype)


class _AllBodies(nn.Module):
    """The bodies of all functions side by side, for a single trace."""

    def __init__(self, bodies: list[_FunctionBody]) -> None:
        super().__init__()
        self.bodies, self.counts = nn.ModuleList(bodies), [len(body.parts) for body in bodies]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the result of each function for its share of the tensors."""
        results, rest = [], iter(tensors)
        for body, count in zip(self.bodies, self.counts, strict=True):
            results.append(body(*itertools.islice(rest, 1 + count)))
        return tuple(results)


class _FunctionBody(nn.Module):
    """The computation of one function: ``numerics.qdq.fake_quantize`` in operators of ONNX."""

    powers: torch.Tensor

    def __init__(self, signature: FunctionSignature) -> None:
        super().__init__()
        self.scheme, self.signature = signature.scheme, signature
        self.parts = [name for name, _ in signature.parts]
        self.register_buffer("powers", POWERS)

    def examples(self) -> Iterator[tuple[torch.Tensor, dict[int, Any]]]:
        """Iterate over examples of the inputs and their axes of any size."""
        shape = self.signature.shape
        sizes = [size or 2 + axis for axis, size in enumerate(shape)]
        free = {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(shape) if size is None}
        yield torch.ones(sizes, dtype=self.signature.dtype), free
        for _, shape in self.signature.parts:
            yield torch.ones(shape), {}

    def forward(self, x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        """Return the quantized values of ``x``, in its type."""
        fmt, scheme = self.scheme.fmt, self.scheme
        static = dict(zip(self.parts, parts, strict=True))
        wide, axis, group = x.float(), scheme.axis % x.dim(), fmt.sub_block or scheme.group
        length = x.shape[axis]
        if scheme.qscheme is QSchemeType.per_group and group != -1:
            # (…, n, …) -> (…, groups, group, …). Groups that do not divide n are padded:
            # 100 inputs in groups of 32 become (4, 32), the last group with 28 zeros.
            wide = torch.unflatten(_pad_to_groups(wide, axis, group), axis, (-1, group))
            axis += 1
        qparams = self._static_qparams if "scale" in static else self._dynamic_qparams
        scale, zeros = qparams(wide, axis, static)
        wide = wide / scale if scheme.divides else wide * scale.reciprocal()
        if fmt.is_float:
            wide = round_to_float(wide, fmt)
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
        return to_layer_dtype(wide, x.dtype)

    def _static_qparams(
        self, x: torch.Tensor, axis: int, static: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return static scale and zero point in shapes that broadcast over ``x``."""
        scale, zeros = static["scale"], static.get("zero_point")
        if self.scheme.qscheme is QSchemeType.per_channel:
            shape = [-1 if i == axis else 1 for i in range(x.dim())]
            scale = scale.reshape(shape)
            zeros = None if zeros is None else zeros.reshape(shape)
        return scale, zeros

    def _dynamic_qparams(
        self, x: torch.Tensor, axis: int, static: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scale and zero point of the range of ``x``, in shapes that broadcast over it."""
        scheme, axes = self.scheme, tuple(range(x.dim()))
        if scheme.qscheme is not QSchemeType.per_tensor:
            axes = (-1,) if scheme.per_token else (axis,)
        lo, hi = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
        return activation_qparams(lo, hi, axis - 1, scheme, self.powers, static.get("tensor_scale"))


def _to_function_body(graph: Any) -> Any:
    """Change an ``onnx_ir.Graph`` in place into the body of a function, and return it.

    A function has no initializers, so they become Constant nodes. Shapes are removed, because the
    names of their axes are not those of the caller.
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


def _pad_to_groups(x: torch.Tensor, axis: int, group: int) -> torch.Tensor:
    """Return ``x`` with zeros at the end of an axis, up to a multiple of ``group``."""
    missing = -x.shape[axis] % group
    return F.pad(x, (0, 0) * (x.dim() - 1 - axis) + (0, missing)) if missing else x
