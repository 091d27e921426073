"""In-place operations become operations that return a new tensor.

``y = conv(x); y.relu_()`` becomes ``relu(conv(x))``, so that later passes see one value for each
node. Writes that others can see, such as those to buffers, stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.aliasing import alias_groups, written_arguments
from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    fake_call,
    fake_value,
    insert_call,
    replace,
)
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass


def _find(graph: GraphModule, options: PassOptions) -> Candidates:
    groups = alias_groups(graph)
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    candidates = Candidates([], {})
    for node in order:
        if written_arguments(node):
            reason = _obstacle(node, groups[node], order)
            if reason is None:
                candidates.nodes.append(node.name)
            else:
                candidates.left[node.name] = reason
    return candidates


def _obstacle(node: Node, aliases: set[Node], order: dict[Node, int]) -> str | None:
    """Return why an operation must write to its argument, or None."""
    target = _functional(node)
    written = written_arguments(node)
    if target is None or written != [arguments(node).get("self")]:
        return "torch has no form of it that returns a new tensor"
    for alias in aliases:
        if order[alias] < order[node]:
            if alias.op in ("placeholder", "get_attr"):
                return f"it writes to {alias.name}"
            is_read = any(order[user] > order[node] for user in alias.users)
            if alias is not written[0] and is_read:
                return f"{alias.name} shares the memory, and is read later"
    new, old = fake_call(target, node.args, node.kwargs), fake_value(node)
    if old is None or (new.shape, new.dtype) != (old.shape, old.dtype):
        return "a new tensor would have another shape or type"
    return None


def _functional(node: Node) -> OpOverload | None:
    """Return the operation with the same arguments that returns a new tensor, or None."""
    assert isinstance(node.target, OpOverload)
    name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
    packet: Any = getattr(torch.ops.aten, name, None)
    target = getattr(packet, node.target._overloadname, None)
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return None
    names, own = ([a.name for a in t._schema.arguments] for t in (target, node.target))
    return target if names[1:] == own[1:] else None  # "input" may be called "self" in place


def _make_functional(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    target = _functional(node)
    assert target is not None
    result = insert_call(node, target, *node.args, **node.kwargs)
    order = {each: place for place, each in enumerate(graph.graph.nodes)}
    [written] = written_arguments(node)
    written.replace_all_uses_with(result, lambda user: order[user] > order[node])
    replace(node, result)
    return result


MAKE_FUNCTIONAL = Pass("make an in-place operation return a tensor", _find, _make_functional)
