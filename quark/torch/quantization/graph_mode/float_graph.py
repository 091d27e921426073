"""The float graph: a copy with parameters of its own, rewritten for quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.utils._pytree import tree_unflatten

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.nodes import call_functions, operator_name
from quark.torch.quantization.graph_mode.passes.graph_edits import arguments, deep_copy
from quark.torch.quantization.graph_mode.passes.preparation import apply_all
from quark.torch.quantization.graph_mode.passes.proof import Proof

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


def independent_copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of an exported graph with parameters of its own.

    The copy has no guards, which check the shapes of inputs, and it can change between training
    and evaluation mode.

    Args:
        graph: Result of ``torch.export.export(model.eval(), args).module()``.

    Raises:
        ValueError: The graph was exported in training mode, or torch.export did not make it.
    """
    _check_exported(graph)
    modes = {name: mode for name, mode in vars(graph).items() if name in ("train", "eval")}
    for name in modes:
        del vars(graph)[name]  # an exported graph refuses to change its mode
    try:
        copied = deep_copy(graph)
    finally:
        vars(graph).update(modes)
    for hooks in (copied._forward_pre_hooks, copied._forward_pre_hooks_with_kwargs):
        hooks.clear()
    for node in list(copied.graph.nodes):
        if node.op == "call_module" and not node.users:
            copied.graph.erase_node(node)  # a guard
    copied.delete_all_unused_submodules()
    copied.recompile()
    return copied.eval()


def start_proof(graph: fx.GraphModule, inputs: Sequence[Any]) -> Proof:
    """Return a proof of rewrites of a graph on given inputs, or on two samples of their batch.

    Args:
        graph: Result of ``independent_copy``.
        inputs: An example of each placeholder.
    """
    args, kwargs = tree_unflatten(list(inputs), graph._in_spec)
    codegen: Any = graph.graph._codegen  # graphs of torch.export have pytree_info
    names = codegen.pytree_info.orig_args
    named = dict(zip((name for name in names if name != "self"), args, strict=False)) | kwargs
    return Proof(graph, named if kwargs else args, cuts_batch=True)


def rewrite(
    graph: fx.GraphModule, proof: Proof, options: PassOptions | None = None
) -> fx.GraphModule:
    """Return a graph with the same function that can be quantized better: see ``PASSES``.

    Args:
        graph: Result of ``independent_copy``.
        proof: Result of ``start_proof`` for this graph.
        options: Rewrites that are applied only if they are asked for.

    Raises:
        ValueError: The graph does not run, or an operator writes into a parameter, a buffer, an
            input or a part of a tensor that is read later.
    """
    rewritten = apply_all(graph, proof, options)
    for node in call_functions(rewritten):
        if node.target._schema.is_mutable:  # type: ignore[union-attr]
            raise ValueError(
                f"{node.name} ({node.target}) writes into memory that is read elsewhere: export "
                "the model without it (inplace=False), or give "
                "torch.export.export(model.eval(), args).run_decompositions({}).module()."
            )
    names = {node.name for node in graph.graph.nodes}
    for node in call_functions(rewritten):
        if node.name not in names:
            node._rename(operator_name(node))  # "relu", not "relu_default"
    rewritten.recompile()
    return rewritten


def _check_exported(graph: fx.GraphModule) -> None:
    """Raise if a graph has no shapes, as ``torch.fx.symbolic_trace`` makes it, or trains."""
    if all(node.op != "call_function" or "val" not in node.meta for node in graph.graph.nodes):
        raise ValueError(
            "The graph has no shapes, so torch.export did not make it: give "
            "torch.export.export(model.eval(), args).module()."
        )
    for node in call_functions(graph):
        argument = _TRAINING.get(operator_name(node))
        if argument is not None and arguments(node).get(argument):
            raise ValueError(
                f"{node.name} ({operator_name(node)}) is in training mode: call model.eval() "
                "before torch.export.export."
            )
