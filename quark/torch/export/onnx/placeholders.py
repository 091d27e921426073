"""Placeholders for quantized parameters in a trace, and their replacement by DequantizeLinear.

The exporter of torch has no types for narrow codes. So the trace sees a placeholder in place of
each quantized parameter: one element expanded to its shape, which takes no memory and no time.
Afterwards ``replace_placeholders`` puts codes, scales and a DequantizeLinear node into the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.export.onnx.dequantize_linear import (
    DECODED,
    DequantizeInputs,
    to_dequantize_inputs,
)
from quark.torch.numerics.qdq import FLOAT16_MAX
from quark.torch.quantization.nn.quantizer import QuantizedTensor

_PLACEHOLDER = "placeholder"


class ParameterPlaceholder(nn.Module):
    """A quantized parameter, represented in the trace by a placeholder.

    Args:
        state: The parameter.
        dtype: Type of its values.
        is_transposed: Whether a matrix is stored, and returned, transposed.
    """

    placeholder: torch.Tensor

    def __init__(
        self, state: QuantizedTensor, dtype: torch.dtype, is_transposed: bool = False
    ) -> None:
        super().__init__()
        assert state.codes is not None
        shape, stored = state.codes.shape, to_dequantize_inputs(state)
        self.stored = stored.transposed() if is_transposed else stored
        shape = torch.Size(reversed(shape)) if is_transposed else shape
        element = torch.zeros((), dtype=dtype, device=state.codes.device)
        self.register_buffer(_PLACEHOLDER, element.expand(shape))
        # Models read these of a weight, as in x.to(layer.weight.dtype).
        self.dtype, self.device, self.shape = dtype, element.device, state.codes.shape

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the placeholder of the values, in ``dtype``."""
        values = self.placeholder
        return values if values.dtype == dtype else values.to(dtype)


def replace_placeholders(model: Any, root: nn.Module, opset: int) -> set[Any]:
    """Replace the placeholders in a graph by codes, scales and DequantizeLinear nodes.

    Args:
        model: ``onnx_ir.Model`` of ``root``. It is changed.
        root: The module that was traced.
        opset: Version of the operators.

    Returns:
        The new nodes (``onnx_ir.Node``).
    """
    parts: Mapping[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))
    first, before = model.graph[0], set(model.graph)
    for name, value in list(model.graph.initializers.items()):
        owner, _, last = name.rpartition(".")
        part = parts.get(owner)
        if last != _PLACEHOLDER or not isinstance(part, ParameterPlaceholder):
            continue
        stored = part.stored.in_types_of(opset)
        values = _ParameterNodes(model.graph, first, owner).add(stored, part.placeholder)
        values.type, values.shape = value.type, value.shape
        values.name = owner.removeprefix("model.")
        value.replace_all_uses_with(values)
        del model.graph.initializers[name]
    return set(model.graph) - before


class _ParameterNodes:
    """Adds the nodes that compute the values of one parameter.

    Args:
        graph: ``onnx_ir.Graph`` to which nodes are added.
        first: Node before which they are inserted.
        name: Name of the parameter in the model.
    """

    def __init__(self, graph: Any, first: Any, name: str) -> None:
        self.graph, self.first, self.name = graph, first, name

    def add(self, stored: DequantizeInputs, placeholder: torch.Tensor) -> Any:
        """Return the values (``onnx_ir.Value``) in the shape and type of the placeholder."""
        import onnx_ir as ir

        value = self.tensor("codes", stored.codes, stored.code_type)
        if stored.table is not None:
            value = self.node("Cast", value, to=ir.DataType.INT32.value)
            value = self.node("Gather", self.tensor("table", stored.table), value)
            value = self.node("Cast", value, to=ir.DataType[DECODED].value)
        dtype = torch.float32
        if stored.scale is None:
            dtype = stored.codes.dtype
        else:
            parts = [value, self.tensor("scale", stored.scale, stored.scale_type)]
            if stored.zero_point is not None:
                parts.append(self.tensor("zero_point", stored.zero_point, stored.code_type))
            axis = {} if stored.axis is None else {"axis": stored.axis}
            block = {"block_size": stored.block} if stored.block else {}
            kind = {"output_dtype": ir.DataType.FLOAT.value} if stored.scale_type else {}
            value = self.node("DequantizeLinear", *parts, **axis, **block, **kind)
        if stored.codes.shape != placeholder.shape:
            shape = torch.tensor(placeholder.shape, dtype=torch.int64, device="cpu")
            value = self.node("Reshape", value, self.tensor("shape", shape))
        if placeholder.dtype == torch.float16 and dtype == torch.float32:
            bounds = {"lowest": -FLOAT16_MAX, "largest": FLOAT16_MAX}
            limits = {
                name: torch.tensor(bound, dtype=torch.float32, device="cpu")
                for name, bound in bounds.items()
            }
            value = self.node("Clip", value, *(self.tensor(n, v) for n, v in limits.items()))
        if placeholder.dtype != dtype:
            value = self.node("Cast", value, to=_onnx_type(placeholder.dtype).value)
        return value

    def tensor(self, name: str, values: torch.Tensor, code_type: str = "") -> Any:
        """Add an initializer, in the ONNX type ``code_type`` if torch has no such type here."""
        import onnx_ir as ir
        from onnx_ir.tensor_adapters import TorchTensor

        name = f"{self.name}.{name}"
        is_wide = values.dtype == torch.float32 and code_type != ""
        if code_type and (is_wide or ir.DataType[code_type].bitwidth < 8):
            narrow = values.numpy(force=True).astype(ir.DataType[code_type].numpy())
            content = ir.Tensor(narrow, name=name)
        else:
            content = TorchTensor(values, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(content.dtype), shape=content.shape, const_value=content
        )
        self.graph.register_initializer(value)
        return value

    def node(self, operator: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node and return its output."""
        import onnx_ir as ir

        node = ir.node(operator, inputs, attributes)
        self.graph.insert_before(self.first, node)
        return node.outputs[0]


def _onnx_type(dtype: torch.dtype) -> Any:
    from onnx_ir.tensor_adapters import from_torch_dtype

    return from_torch_dtype(dtype)
