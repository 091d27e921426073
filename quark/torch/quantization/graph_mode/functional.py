"""A graph as quantization takes it: a copy, without guards, without operators that write."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from quark.torch.quantization.graph_mode.arguments import (
    call_functions,
    named_arguments,
    operator_name,
    value_of,
)

# Operators that behave differently while training -> the argument that says so.
_TRAINING = {
    "batch_norm": "training",
    "_native_batch_norm_legit": "training",
    "instance_norm": "use_input_stats",
    "dropout": "train",
    "feature_dropout": "train",
    "alpha_dropout": "train",
    "native_dropout": "train",
}
_REMEDY = (
    "export the model without it (inplace=False), or give "
    "torch.export.export(model.eval(), args).run_decompositions({}).module()."
)


def functional_copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an exported graph with parameters of its own.

    The copy has no guards, which check the shapes of inputs, and in-place operators are replaced
    by those that return a new tensor. It can change between training and evaluation mode.

    Args:
        graph: Result of ``torch.export.export(model.eval(), args).module()``.

    Raises:
        ValueError: The graph was exported in training mode, or an operator writes into a
            parameter, a buffer or a part of a tensor that is read later.
    """
    _check_exported(graph)
    modes = {name: m for name, m in vars(graph).items() if name in ("train", "eval")}
    for name in modes:
        del vars(graph)[name]  # an exported graph refuses to change its mode
    try:
        copied = copy.deepcopy(graph)
    finally:
        vars(graph).update(modes)
    for node in list(copied.graph.nodes):
        if node.op == "call_module" and not node.users:
            copied.graph.erase_node(node)  # a guard
    for node in list(call_functions(copied)):
        if node.target._schema.is_mutable:  # type: ignore[union-attr]
            _replace_write(copied, node)
    copied.delete_all_unused_submodules()
    copied.graph.lint()
    copied.recompile()
    return copied.eval()


def _check_exported(graph: fx.GraphModule) -> None:
    """Raise if a graph has no shapes, as ``torch.fx.symbolic_trace`` makes it, or trains."""
    if all(node.op != "call_function" or "val" not in node.meta for node in graph.graph.nodes):
        raise ValueError(
            "The graph has no shapes, so torch.export did not make it: give "
            "torch.export.export(model.eval(), args).module()."
        )
    for node in call_functions(graph):
        argument = _TRAINING.get(operator_name(node))
        if argument is not None and named_arguments(node).get(argument):
            raise ValueError(
                f"{node.name} ({operator_name(node)}) is in training mode: call model.eval() "
                "before torch.export.export."
            )


def _replace_write(graph: fx.GraphModule, node: fx.Node) -> None:
    """Replace an operator that writes into its first argument by one that does not."""
    written: Any = node.args[0]
    functional = _functional_overload(node)
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    later = [
        n.name
        for n in graph.graph.nodes
        if n not in (node, written)
        and _shares_memory(n, written)
        and order[n] < order[node]
        and any(order[user] > order[node] for user in n.users)
    ]
    if functional is None or written.op == "get_attr" or later:
        place = f"{written.name}, a part of {', '.join(later)}" if later else written.name
        raise ValueError(f"{node.name} ({node.target}) writes into {place}: {_REMEDY}")
    node.target = functional
    written.replace_all_uses_with(node, delete_user_cb=lambda user: order[user] > order[node])


def _functional_overload(node: fx.Node) -> Any:
    """Return the operator that computes the same without writing, or None."""
    overload: Any = node.target
    name = operator_name(node)
    writes = [
        a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments
    ]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or sum(writes) != 1 or not writes[0] or packet is None:
        return None
    return getattr(packet, overload._overloadname, None)


def _shares_memory(node: fx.Node, other: fx.Node) -> bool:
    values = value_of(node), value_of(other)
    if values[0] is None or values[1] is None:
        return False
    addresses = {value.untyped_storage()._cdata for value in values if value is not None}
    return len(addresses) == 1
