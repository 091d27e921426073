"""Nodes of a graph: operators, values, the modules that they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from quark.torch.quantization.graph_mode.passes.graph_edits import fake_value


def is_aten(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch, not a module or a function of Python."""
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that a node calls, such as ``conv2d``; "" if it calls none.

    Overloads share a name: ``add`` stands for add.Tensor and add.Scalar.
    """
    return node.target._schema.name.split("::")[-1] if is_aten(node) else ""  # type: ignore[union-attr]


def is_float_tensor(node: Any) -> bool:
    """Whether an argument is a node whose result is a floating-point tensor with axes."""
    value = fake_value(node)
    is_tensor = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_tensor and value.dim() > 0


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
