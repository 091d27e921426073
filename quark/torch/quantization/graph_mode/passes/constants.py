"""Values that do not depend on the inputs are computed once.

What is computed from buffers and numbers becomes a buffer. What is computed from parameters stays
as it is, since these are trained, unless it is the weight of a layer: the weight of a layer with
weight normalization, for example, becomes a parameter, which is trained instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.aliasing import alias_groups, written_arguments
from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    fake_value,
    insert_tensor,
    read_tensor,
    replace,
    unused_name,
)
from quark.torch.quantization.graph_mode.passes.layers import is_layer_call
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass

_SMALL = 1 << 20  # bytes; a larger constant is stored only if it is made of as large ones


def _constant_nodes(graph: GraphModule) -> dict[Node, set[Node]]:
    """Return the nodes that no input and no random number changes -> the tensors they read."""
    groups = alias_groups(graph)
    written = {a for n in graph.graph.nodes for w in written_arguments(n) for a in groups[w]}
    constants: dict[Node, set[Node]] = {}
    for node in graph.graph.nodes:
        if node in written:
            continue
        if read_tensor(graph, node) is not None:
            constants[node] = {node}
        elif _is_deterministic(node) and all(n in constants for n in node.all_input_nodes):
            constants[node] = set().union(*(constants[n] for n in node.all_input_nodes))
    return constants


def _is_deterministic(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and not node.is_impure()
    )


def _find(graph: GraphModule, options: PassOptions) -> Candidates:
    constants = _constant_nodes(graph)
    candidates = Candidates([], {})
    for node, sources in constants.items():
        value = fake_value(node)
        is_last = any(user not in constants for user in node.users)
        if node in sources or not is_last or not isinstance(value, torch.Tensor):
            continue
        tensors = [t for s in sources if (t := read_tensor(graph, s)) is not None]
        is_trained = any(isinstance(t, nn.Parameter) for t in tensors)
        if is_trained and _parameter_name(node) is None:
            continue
        if value.nbytes > max(_SMALL, sum(t.nbytes for t in tensors)):
            candidates.left[node.name] = f"it would take {value.nbytes >> 20} MiB"
        else:
            candidates.nodes.append(node.name)
    return candidates


def _parameter_name(node: Node) -> str | None:
    """Return ``weight`` or ``bias`` if a node is that of layers and nothing else, else None."""
    roles = {
        next((name for name in ("weight", "bias") if arguments(user).get(name) is node), None)
        if is_layer_call(user)
        else None
        for user in node.users
    }
    return roles.pop() if len(roles) == 1 else None


def _compute(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    sources = _constant_nodes(graph)[node]
    tensors = [t for s in sources if (t := read_tensor(graph, s)) is not None]
    value = _evaluate(graph, node, {}).clone(memory_format=torch.contiguous_format)
    if any(isinstance(t, nn.Parameter) for t in tensors):
        value = nn.Parameter(value, any(t.requires_grad for t in tensors))
        name = _layer_name({str(s.target) for s in sources}, str(_parameter_name(node)))
    else:
        name = f"constant_{node.name}"
    result = insert_tensor(graph, node, unused_name(graph, name), value)
    replace(node, result)
    return result


@torch.no_grad()
def _evaluate(graph: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    """Return the value of a constant node, and keep those that it is made of in ``values``."""
    if node not in values:
        for source in node.all_input_nodes:
            _evaluate(graph, source, values)
        tensor = read_tensor(graph, node)
        if tensor is None:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            assert callable(node.target)
            tensor = node.target(*args, **kwargs)
        values[node] = tensor
    return values[node]


def _layer_name(names: set[str], leaf: str) -> str:
    """Return the name of a parameter that is computed from others.

    Example: conv.weight_g, conv.weight_v -> conv.weight, and
    conv.parametrizations.weight.original0, conv.parametrizations.weight.original1 -> conv.weight.
    """
    owners = {
        name.partition(".parametrizations.")[0]
        if ".parametrizations." in name
        else name.rpartition(".")[0]
        for name in names
    }
    owner = owners.pop() if len(owners) == 1 else ""
    return f"{owner}.{leaf}" if owner else leaf


COMPUTE_CONSTANTS = Pass("compute a constant", _find, _compute)
