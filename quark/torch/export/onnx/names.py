"""Names in an ONNX graph: nodes are named after modules, quantized values after what they hold."""

from __future__ import annotations

import ast
from collections.abc import Collection
from typing import Any

from quark.torch.export.onnx.functions import DOMAIN

_SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter of torch writes the modules of a node


def set_names(model: Any, output_names: Collection[str]) -> None:
    """Name the nodes and the quantized values of a graph, in place.

    Example: a convolution ``features.0`` whose output is quantized becomes the nodes and values

        features.0/Conv -> conv2d
        edge_quantizers.conv2d/QuantizeLinear -> conv2d_quantized
        edge_quantizers.conv2d/DequantizeLinear -> conv2d_dequantized

    Args:
        model: ``onnx_ir.Model`` from the exporter of torch, whose module holds the model as
            ``model``.
        output_names: Names of outputs that do not change.
    """
    for value in list(model.graph.initializers.values()):
        value.name = value.name.removeprefix("model.")
    nodes: set[str] = set()
    values = {value.name for value in (*model.graph.inputs, *model.graph.initializers.values())}
    values |= {value.name for node in model.graph for value in node.outputs}
    for node in model.graph:
        node.name = _vacant(_node_name(node), nodes)
        nodes.add(node.name)
        output = node.outputs[0]
        name = _value_name(node)
        if name and output.name not in output_names:
            values.discard(output.name)
            output.name = _vacant(name, values)
            values.add(output.name)


def _node_name(node: Any) -> str:
    """Return the name of a node, that of the innermost module in front."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))  # "['', 'model.fc', 'mm']"
    path = scopes[-2].removeprefix("model").strip(".") if len(scopes) > 1 else ""
    path = path or (scopes[-1] if scopes else node.outputs[0].name)
    return f"{path}/{node.op_type}"


def _value_name(node: Any) -> str | None:
    """Return the name of a value that is quantized or dequantized, None for others."""
    source = node.inputs[0].name if node.inputs and node.inputs[0] is not None else ""
    if node.op_type == "QuantizeLinear":
        return f"{source}_quantized"
    if node.domain == DOMAIN:
        return f"{source}_dequantized"
    producer = node.inputs[0].producer() if source else None
    if node.op_type != "DequantizeLinear" or producer is None:
        return None
    is_pair = producer.op_type == "QuantizeLinear"
    return f"{producer.inputs[0].name}_dequantized" if is_pair else None


def _vacant(name: str, taken: Collection[str]) -> str:
    """Return a name, with a number if it is taken."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
