"""Preparation of an exported graph for quantization: all passes in turn, each proved by running."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch.fx import GraphModule

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.graph_edits import clean_, copy_graph
from quark.torch.quantization.graph_mode.passes.proof import Proof
from quark.torch.quantization.graph_mode.passes.registry import PASSES
from quark.torch.quantization.graph_mode.passes.rewriting import apply_passes


def prepare(
    graph: GraphModule,
    example_inputs: Any,
    options: PassOptions | None = None,
) -> GraphModule:
    """Return a graph with the same function that can be quantized better.

    Batch norms are folded into layers, constants are computed, dead code is removed, and more: see
    ``PASSES``. Each rewrite is proved by running the graph before and after it, on the example
    inputs and on random ones. A rewrite that changes a value is undone, and the log names it.

    Args:
        graph: Result of ``torch.export.export(model.eval(), args).module()``. It is unchanged.
        example_inputs: Arguments of the graph: a tensor, a tuple, or a mapping of
            arguments by name.
        options: Rewrites that are applied only if they are asked for.

    Returns:
        A new graph. It shares all parameters with the given one, except those that changed.

    Raises:
        ValueError: The graph does not run on the example inputs.
    """
    return apply_all(graph, Proof(graph, example_inputs), options)


def apply_all(graph: GraphModule, proof: Proof, options: PassOptions | None = None) -> GraphModule:
    """Return what ``prepare`` returns, proved by a given proof."""
    options = options or PassOptions()
    graph = copy_graph(graph)
    clean_(graph)
    for _, kinds in groupby(PASSES, lambda kind: kind.is_exact):
        graph = apply_passes(graph, list(kinds), proof, options)
    return graph
