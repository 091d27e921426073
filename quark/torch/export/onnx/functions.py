"""Functions of an ONNX graph that quantize and dequantize inputs and outputs of layers.

A function has dozens of operators. It is written once, however many layers call it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from quark.torch.export.onnx.scales import (
    BlockShape,
    activation_qparams,
    cast,
    merge_axes,
    pad_axis,
    round_to_float,
    split_axis,
)
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.numerics.scales import largest_value
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

    def define(self, model: Any, opset: int) -> None:
        """Add the functions to the ``onnx_ir.Model`` that calls them, in operators of ``opset``."""
        import onnx_ir as ir
        from onnxscript import build_function

        for signature, name in self._names.items():
            inputs = [ir.Value(name=part) for part in (_INPUT, *dict(signature.parts))]
            function = build_function(
                _FunctionBody(signature),
                inputs,
                domain=DOMAIN,
                name=name,
                opset_imports={"": opset},
            )
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


class _FunctionBody:
    """The computation of one function: ``numerics.qdq.fake_quantize`` in operators of ONNX.

    It is called with the builder of the graph and the inputs, and returns the output.
    """

    def __init__(self, signature: FunctionSignature) -> None:
        self.signature, self.scheme = signature, signature.scheme
        self.rank = len(signature.shape)
        self.axis = self.scheme.axis % self.rank
        self.group = self.scheme.fmt.sub_block or self.scheme.group
        in_groups = self.scheme.qscheme is QSchemeType.per_group and self.group != -1
        self.length = signature.shape[self.axis] if in_groups else None

    def __call__(self, op: Any, x: Any, *parts: Any) -> Any:
        """Add the nodes that compute the quantized values of ``x``, in its type."""
        static = dict(zip(dict(self.signature.parts), parts, strict=True))
        wide, blocks = cast(op, x, torch.float32), BlockShape(self.axis, 1)
        if self.length is not None:
            # (…, n, …) -> (…, groups, group, …). Groups that do not divide n are padded:
            # 100 inputs in groups of 32 become (4, 32), the last group with 28 zeros.
            blocks = BlockShape(self.axis, -(-self.length // self.group))
            wide = pad_axis(op, wide, self.axis, blocks.count * self.group - self.length)
            wide = split_axis(op, wide, self.axis, (blocks.count, self.group))
        if "scale" in static:
            scale, zeros = self._static_qparams(op, static)
        else:
            scale, zeros = self._dynamic_qparams(op, wide, blocks, static)
        wide = self._quantize_dequantize(op, wide, scale, zeros)
        if self.length is not None:
            wide = merge_axes(op, wide, self.axis)
            if self.length % self.group:
                wide = op.Slice(wide, [0], [self.length], [self.axis])
        if self.signature.dtype == torch.float16:
            wide = op.Clip(wide, -FLOAT16_MAX, FLOAT16_MAX)
        return cast(op, wide, self.signature.dtype)

    def _quantize_dequantize(self, op: Any, x: Any, scale: Any, zeros: Any) -> Any:
        fmt = self.scheme.fmt
        x = op.Div(x, scale) if self.scheme.divides else op.Mul(x, op.Reciprocal(scale))
        if fmt.is_float:
            return op.Mul(round_to_float(op, x, fmt), scale)
        if zeros is None:
            x = op.Round(x)
        elif self.scheme.float_zero_point:
            x = op.Round(op.Add(x, zeros))
        else:
            x = op.Add(op.Round(x), zeros)
        x = op.Clip(x, float(fmt.qmin), float(fmt.qmax))
        return op.Mul(x if zeros is None else op.Sub(x, zeros), scale)

    def _static_qparams(self, op: Any, static: dict[str, Any]) -> tuple[Any, Any]:
        """Return static scale and zero point in shapes that broadcast over the values."""
        if self.scheme.qscheme is QSchemeType.per_channel:
            shape = [-1 if i == self.axis else 1 for i in range(self.rank)]
            static = {name: op.Reshape(part, shape) for name, part in static.items()}
        return static["scale"], static.get("zero_point")

    def _dynamic_qparams(
        self, op: Any, x: Any, blocks: BlockShape, static: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return scale and zero point of the range of ``x``, in shapes that broadcast over it."""
        scheme = self.scheme
        if scheme.qscheme is QSchemeType.per_tensor:
            axes = list(range(self.rank))
        else:
            axes = [-1 if scheme.per_token else self.axis + (self.length is not None)]
        lo, hi = op.ReduceMin(x, axes), op.ReduceMax(x, axes)
        largest = largest_value(self.signature.dtype)
        return activation_qparams(op, lo, hi, blocks, scheme, static.get("tensor_scale"), largest)
