"""Parameters in codes: put into a graph that was traced with placeholders for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.dequantize_linear import LOOKED_UP, Held, held
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.quantization.nn.quantizer import State

_PLACE = "place"


class Dequantized(nn.Module):
    """A parameter that is stored in codes.

    The trace has a tensor without content in its place, which ``place_weights`` replaces: so it
    takes no memory and no time.

    Args:
        state: The parameter.
        dtype: Type of its values.
        is_transposed: Whether a matrix is stored, and returned, with its axes exchanged.
    """

    place: torch.Tensor

    def __init__(self, state: State, dtype: torch.dtype, is_transposed: bool = False) -> None:
        super().__init__()
        assert state.codes is not None
        shape, stored = state.codes.shape, held(state)
        self.stored = stored.transposed() if is_transposed else stored
        shape = torch.Size(reversed(shape)) if is_transposed else shape
        place = torch.zeros((), dtype=dtype, device=state.codes.device)
        self.register_buffer(_PLACE, place.expand(shape))

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what stands for the values, in ``dtype``."""
        return self.place if self.place.dtype == dtype else self.place.to(dtype)


def place_weights(model: Any, root: nn.Module) -> set[Any]:
    """Replace the placeholders of a graph by DequantizeLinear and what stands by it.

    Args:
        model: ``onnx_ir.Model`` of ``root``. It is changed.
        root: What was traced.

    Returns:
        The nodes (``onnx_ir.Node``) that are new.
    """
    parts: Mapping[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
    first, before = model.graph[0], set(model.graph)
    for name, value in list(model.graph.initializers.items()):
        owner, _, last = name.rpartition(".")
        part = parts.get(owner)
        if last != _PLACE or not isinstance(part, Dequantized):
            continue
        values = _Values(model.graph, first, owner).of(part.stored, part.place)
        values.type, values.shape = value.type, value.shape
        value.replace_all_uses_with(values)
        del model.graph.initializers[name]
    return set(model.graph) - before


class _Values:
    """Nodes that compute the values of one parameter.

    Args:
        graph: ``onnx_ir.Graph`` that they go to.
        first: Node before which they go.
        name: Name of the parameter in the model.
    """

    def __init__(self, graph: Any, first: Any, name: str) -> None:
        self.graph, self.first, self.name = graph, first, name

    def of(self, stored: Held, place: torch.Tensor) -> Any:
        """Return the values (``onnx_ir.Value``) in the shape and type of ``place``."""
        import onnx_ir as ir

        value = self.tensor("codes", stored.codes, stored.kind)
        if stored.table is not None:
            value = self.node("Cast", value, to=ir.DataType.INT32.value)
            value = self.node("Gather", self.tensor("table", stored.table), value)
            value = self.node("Cast", value, to=ir.DataType[LOOKED_UP].value)
        kind = torch.float32
        if stored.scale is None:
            kind = stored.codes.dtype
        else:
            parts = [value, self.tensor("scale", stored.scale)]
            if stored.zero_point is not None:
                parts.append(self.tensor("zero_point", stored.zero_point, stored.kind))
            where = {} if stored.axis is None else {"axis": stored.axis}
            block = {"block_size": stored.block} if stored.block else {}
            value = self.node("DequantizeLinear", *parts, **where, **block)
        if stored.codes.shape != place.shape:
            value = self.node("Reshape", value, self.tensor("shape", torch.tensor(place.shape)))
        if place.dtype == torch.float16 and kind == torch.float32:
            bounds = (-FLOAT16_MAX, FLOAT16_MAX)
            names = ("lowest", "largest")
            limits = (self.tensor(n, torch.tensor(b)) for n, b in zip(names, bounds, strict=True))
            value = self.node("Clip", value, *limits)
        if place.dtype != kind:
            value = self.node("Cast", value, to=_onnx_type(place.dtype).value)
        return value

    def tensor(self, name: str, values: torch.Tensor, kind: str = "") -> Any:
        """Add a tensor, in the ONNX type ``kind`` where torch has no name for its type."""
        import onnx_ir as ir
        from onnx_ir.tensor_adapters import TorchTensor

        name = f"{self.name}.{name}"
        if kind and ir.DataType[kind].bitwidth < 8:
            narrow = values.numpy(force=True).astype(ir.DataType[kind].numpy())
            content = ir.Tensor(narrow, name=name)
        else:
            content = TorchTensor(values, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(content.dtype), shape=content.shape, const_value=content
        )
        self.graph.register_initializer(value)
        return value

    def node(self, kind: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node and return its output."""
        import onnx_ir as ir

        node = ir.node(kind, inputs, attributes)
        self.graph.insert_before(self.first, node)
        return node.outputs[0]


def _onnx_type(dtype: torch.dtype) -> Any:
    from onnx_ir.tensor_adapters import from_torch_dtype

    return from_torch_dtype(dtype)
