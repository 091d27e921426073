"""``Pass``: rewrites of one kind, and their application to a graph with a proof."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.graph_edits import clean_, copy_graph
from quark.torch.quantization.graph_mode.passes.proof import Proof

logger = logging.getLogger("quark")


class Candidates(NamedTuple):
    """Nodes that a pass may rewrite.

    Attributes:
        nodes: Names of the nodes.
        left: Name of a node of this kind that cannot be rewritten -> the reason.
    """

    nodes: list[str]
    left: dict[str, str]


class Pass(NamedTuple):
    """Rewrites of one kind.

    Attributes:
        name: Name for messages, a verb and its object.
        find: Takes a graph and the options, and returns the nodes to rewrite.
        rewrite_: Takes a graph, one of these nodes and the options. It changes the graph in place,
            and returns the node that takes the place of the given one. Parameters that change are
            replaced by new ones, since other graphs read the old ones.
        is_exact: Whether the function of the graph stays the same, which is proved.
    """

    name: str
    find: Callable[[GraphModule, PassOptions], Candidates]
    rewrite_: Callable[[GraphModule, Node, PassOptions], Node]
    is_exact: bool = True


def apply_passes(
    graph: GraphModule, kinds: Sequence[Pass], proof: Proof, options: PassOptions
) -> GraphModule:
    """Return a graph with all rewrites of passes that are proved; the given graph is unchanged.

    The rewrites of all passes are tested together first, then pass by pass if that fails.

    Args:
        graph: The graph.
        kinds: The passes in their order. All keep the function, or there is one.
        proof: Runs graphs.
        options: Options of the passes.
    """
    result, rewritten, places = _rewrite_all(graph, kinds, options)
    if not rewritten:
        return graph
    if proof.find_difference(graph, result, places, kinds[0].is_exact) is None:
        for name, nodes in rewritten.items():
            logger.info("%s: %s", name, ", ".join(nodes))
        return result
    for kind in kinds:
        graph = apply_pass(graph, kind, proof, options)
    return graph


def _rewrite_all(
    graph: GraphModule, kinds: Sequence[Pass], options: PassOptions
) -> tuple[GraphModule, dict[str, list[str]], dict[str, str]]:
    """Return a graph with the rewrites of passes, which are not proved yet.

    Returns:
        The graph; name of a pass -> nodes that it rewrote; name of a node of the given graph ->
        name of the node with its value.
    """
    result = graph
    rewritten: dict[str, list[str]] = {}
    given = {node.name for node in graph.graph.nodes}
    # Name of a node of the result -> name of the node of the given graph that has its value.
    # Example: conv2d with a folded batch norm has the value of batch_norm, not that of conv2d.
    origins: dict[str, str] = {}
    for kind in kinds:
        nodes, left = kind.find(result, options)
        for name, reason in left.items():
            logger.info("%s: %s is left as it is: %s.", kind.name, name, reason)
        if not nodes:
            continue
        result = copy_graph(graph) if result is graph else result
        rewritten[kind.name] = nodes
        by_name = {node.name: node for node in result.graph.nodes}
        for name in nodes:
            origin = origins.pop(name, name if name in given else None)
            place = kind.rewrite_(result, by_name[name], options).name
            if origin is not None:
                origins[place] = origin
        clean_(result)
    names = {node.name for node in result.graph.nodes}
    return result, rewritten, {o: place for place, o in origins.items() if place in names}


def apply_pass(graph: GraphModule, kind: Pass, proof: Proof, options: PassOptions) -> GraphModule:
    """Return a graph with all rewrites of a pass that are proved; the given graph is unchanged.

    All rewrites are tested together first, and one by one if that fails.

    Args:
        graph: The graph.
        kind: The pass.
        proof: Runs graphs.
        options: Options of the passes.
    """
    nodes, left = kind.find(graph, options)
    for name, reason in left.items():
        logger.info("%s: %s is left as it is: %s.", kind.name, name, reason)
    if not nodes:
        return graph
    result, difference = _try_rewrites(graph, kind, nodes, proof, options)
    if difference is None:
        logger.info("%s: %s", kind.name, ", ".join(nodes))
        return result
    for name in nodes:
        # An earlier rewrite may have removed the node.
        if len(nodes) > 1 and name in kind.find(graph, options).nodes:
            result, difference = _try_rewrites(graph, kind, [name], proof, options)
        if difference is None:
            logger.info("%s: %s", kind.name, name)
            graph = result
        else:
            logger.warning("%s: %s is left as it is: %s.", kind.name, name, difference)
    return graph


def _try_rewrites(
    graph: GraphModule, kind: Pass, nodes: Sequence[str], proof: Proof, options: PassOptions
) -> tuple[GraphModule, str | None]:
    """Return a graph with rewrites, and how it differs from the given one."""
    result = copy_graph(graph)
    by_name = {node.name: node for node in result.graph.nodes}
    places = {name: kind.rewrite_(result, by_name[name], options).name for name in nodes}
    clean_(result)
    names = {node.name for node in result.graph.nodes}
    # A node that was merged into a later one, or is not read, is not in the result.
    compared = {name: place for name, place in places.items() if place in names}
    return result, proof.find_difference(graph, result, compared, kind.is_exact)
