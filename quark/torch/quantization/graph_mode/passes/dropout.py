"""Dropout that is switched off is removed."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.graph_edits import arguments, is_call, replace
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass

_NAMES = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def _find(graph: GraphModule, options: PassOptions) -> Candidates:
    candidates = Candidates([], {})
    for node in graph.graph.nodes:
        if is_call(node, *_NAMES):
            given = arguments(node)
            if given["train"] and given["p"] > 0:
                candidates.left[node.name] = "it is on; export the model in evaluation mode"
            else:
                candidates.nodes.append(node.name)
    return candidates


def _remove(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    value: Node = arguments(node)["input"]
    replace(node, value)
    return value


REMOVE_DROPOUT = Pass("remove dropout", _find, _remove)
