"""Arguments of the operators in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def is_aten(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch, not a module or a function of Python."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, such as ``conv2d``; "" if it calls none.

    Overloads share a name: ``add`` stands for add.Tensor and add.Scalar.
    """
    return node.target._schema.name.split("::")[-1] if is_aten(node) else ""  # type: ignore[union-attr]


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator by name, defaults included."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    values = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given = {p.name: value for p, value in zip(parameters, node.args, strict=False)}
    return values | given | node.kwargs


def value_of(node: fx.Node) -> torch.Tensor | None:
    """Return the example tensor of a node, without values; None if the node is not one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_float_tensor(node: Any) -> bool:
    """Whether an argument is a node whose result is a floating-point tensor with axes."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value is not None and value.is_floating_point() and value.dim() > 0


def attribute(graph: fx.GraphModule, target: Any) -> Any:
    """Return the parameter, buffer or constant of a ``get_attr`` node."""
    result: Any = graph
    for part in str(target).split("."):
        result = getattr(result, part)
    return result


def module_path(node: fx.Node) -> str:
    """Return the name of the innermost module of the model that a node comes from, or ""."""
    return _innermost(node)[0]


def module_type(node: fx.Node) -> str:
    """Return the class of that module, such as ``torch.nn.modules.activation.ReLU``, or ""."""
    return _innermost(node)[1]


def _innermost(node: fx.Node) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = next(reversed(stack.values()), ("", ""))
    if isinstance(kind, type):
        kind = f"{kind.__module__}.{kind.__qualname__}"
    # The second call of a module is "blk.relu@1".
    return str(path).partition("@")[0], kind


def call_functions(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Iterate over the nodes of a graph that call operators of torch."""
    return (node for node in graph.graph.nodes if is_aten(node))
