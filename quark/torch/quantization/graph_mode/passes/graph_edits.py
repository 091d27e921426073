"""Edits of a graph: copies, arguments by name, new nodes, new parameters.

A graph is the `torch.fx.GraphModule` that ``torch.export.export(model, args).module()`` returns.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

Module = TypeVar("Module", bound=nn.Module)

# Checks of inputs that ``torch.export`` attaches to a graph; ``copy.deepcopy`` drops them.
_INPUT_CHECKS = ("validate_inputs", "range_constraints")


def deep_copy(module: Module, shared: Iterable[torch.Tensor] = ()) -> Module:
    """Return a copy of a graph, or of a module that may be one.

    Args:
        module: The module.
        shared: Tensors that the copy shares with it.
    """
    with warnings.catch_warnings():
        # torch copies its own description of the inputs, which it has deprecated.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def copy_graph(graph: GraphModule) -> GraphModule:
    """Return a copy of a graph that shares parameters, buffers and constants with it."""
    result = deep_copy(graph, tensors(graph).values())
    for name in _INPUT_CHECKS:
        if name in vars(graph):
            setattr(result, name, vars(graph)[name])
    for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        getattr(result, hooks).update(getattr(graph, hooks))
    return result


def clean_(graph: GraphModule) -> None:
    """Remove the nodes of a graph that no output depends on, and the tensors that no node reads."""
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for prefix, module in graph.named_modules():
        for leaf in [*module._parameters, *module._buffers]:
            if (f"{prefix}.{leaf}" if prefix else leaf) not in used:
                delattr(module, leaf)
    graph.graph.lint()
    graph.recompile()


def tensors(graph: GraphModule) -> dict[str, torch.Tensor]:
    """Return the tensors that a graph reads: parameters, buffers, constants; by name."""
    names = dict.fromkeys(str(n.target) for n in graph.graph.nodes if n.op == "get_attr")
    values = {name: get_member(graph, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def get_member(graph: GraphModule, name: str) -> Any:
    """Return a member of a graph by its dotted name."""
    return attrgetter(name)(graph)


def read_tensor(graph: GraphModule, node: Any) -> torch.Tensor | None:
    """Return the parameter, buffer or constant that a node reads, or None if it computes."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = get_member(graph, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def readers(graph: GraphModule, tensor: torch.Tensor) -> list[Node]:
    """Return the nodes that compute with a tensor of the graph, under any of its names."""
    shapes = (tuple(tensor.shape), None)  # a look at the shape is faster than at the tensor
    nodes = (n for n in graph.graph.find_nodes(op="get_attr") if shape_of(n) in shapes)
    sources = [n for n in nodes if read_tensor(graph, n) is tensor]
    return list(dict.fromkeys(user for source in sources for user in source.users))


def is_call(node: Any, *operations: str) -> bool:
    """Whether a node calls one of the operations of aten, given by name without overload."""
    return (
        isinstance(node, Node)
        and isinstance(node.target, OpOverload)
        and node.target._schema.name.removeprefix("aten::") in operations
    )


def arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of a call of an operation by name, with defaults."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema}
    names = (argument.name for argument in schema)
    return {**values, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def set_arguments(node: Node, **changes: Any) -> None:
    """Replace arguments of a call, by name."""
    assert isinstance(node.target, OpOverload)
    values = {**arguments(node), **changes}
    schema = node.target._schema.arguments
    node.args = tuple(values[a.name] for a in schema if not a.kwarg_only)
    node.kwargs = {a.name: values[a.name] for a in schema if a.kwarg_only}


def fake_value(node: Any) -> Any:
    """Return the value of a node without data: shape, type and device; None if it is not known."""
    return node.meta.get("val") if isinstance(node, Node) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the shape of the value of a node, or None if it is not one tensor."""
    value = fake_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def fake_call(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of a call without data."""
    args, kwargs = map_arg((args, dict(kwargs)), fake_value)
    leaves = [x for x in [*args, *kwargs.values()] if hasattr(x, "fake_mode")]
    with leaves[0].fake_mode:
        return target(*args, **kwargs)


def insert_call(before: Node, target: OpOverload, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of an operation before a node, and return it."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = {key: before.meta[key] for key in ("nn_module_stack",) if key in before.meta}
    node.meta["val"] = fake_call(target, args, kwargs)
    return node


def replace(node: Node, value: Node) -> None:
    """Remove a node; what reads it reads another node instead, which has the same value."""
    node.replace_all_uses_with(value)
    value.meta = {**node.meta, **value.meta}
    node.graph.erase_node(node)


def insert_tensor(graph: GraphModule, before: Node, name: str, value: torch.Tensor) -> Node:
    """Store a tensor in a graph, and return a new node before a node that reads it.

    Args:
        graph: The graph.
        before: The node.
        name: Dotted name. What has this name is replaced.
        value: A parameter, or a tensor that becomes a buffer.
    """
    prefix, _, leaf = name.rpartition(".")
    if prefix and not _has_submodule(graph, prefix):
        graph.add_submodule(prefix, nn.Module())
    owner = graph.get_submodule(prefix)
    if leaf in vars(owner) or hasattr(owner, leaf):
        delattr(owner, leaf)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    else:
        owner.register_buffer(leaf, value)
    with graph.graph.inserting_before(before):
        node = graph.graph.get_attr(name)
    mode = next(v.fake_mode for n in graph.graph.nodes if hasattr(v := fake_value(n), "fake_mode"))
    with mode:
        node.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return node


def unused_name(graph: GraphModule, name: str) -> str:
    """Return a name that no member of a graph has: the given one, or with a number after it."""
    candidate, number = name, 0
    while _has_member(graph, candidate):
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _has_submodule(graph: GraphModule, name: str) -> bool:
    try:
        graph.get_submodule(name)
    except AttributeError:
        return False
    return True


def _has_member(graph: GraphModule, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return _has_submodule(graph, owner) and hasattr(graph.get_submodule(owner), leaf)
