"""Nodes whose values share memory, by the schemas of the operations."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from quark.torch.quantization.graph_mode.passes.graph_edits import arguments


def alias_groups(graph: GraphModule) -> dict[Node, set[Node]]:
    """Return each node with the nodes that may share memory with it, itself included.

    Example: ``y = x.view(-1); z = y + 1; z.relu_()``: {x, y} and {z, z.relu_()}.
    """
    groups: dict[Node, set[Node]] = {}
    for node in graph.graph.nodes:
        merged = {node}.union(*(groups[source] for source in _aliased_arguments(node)))
        groups.update(dict.fromkeys(merged, merged))
    return groups


def written_arguments(node: Node) -> list[Node]:
    """Return the arguments that an operation writes to."""
    if not isinstance(node.target, OpOverload):
        return []
    given = arguments(node)
    schema = node.target._schema.arguments
    written = (given[a.name] for a in schema if a.alias_info is not None and a.alias_info.is_write)
    return [leaf for value in written for leaf in _node_leaves(value)]


def _aliased_arguments(node: Node) -> list[Node]:
    """Return the arguments whose memory the value of a node may share."""
    if node.op == "output":
        return []
    if not isinstance(node.target, OpOverload):  # such as an element of a tuple
        return _node_leaves((node.args, node.kwargs))
    given = arguments(node)
    aliased = (given[a.name] for a in node.target._schema.arguments if a.alias_info is not None)
    return [leaf for value in aliased for leaf in _node_leaves(value)]


def _node_leaves(value: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
