"""Operators of a graph that only move values, such as reshape, max pooling and concatenation.

Each operator is run on random numbers. It moves values if every element of its results is an
element of its inputs, or zero. Values on the grid of a quantizer stay on it then, so the results
share the scale of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from quark.torch.quantization.graph_mode.nodes import is_aten

# Limits of activations, such as 6 of ReLU6, are among the inputs in neither or one of these.
_MAGNITUDES = (0.5, 1000.0)


@torch.no_grad()
def find_movements(graph: fx.GraphModule, inputs: Sequence[Any]) -> set[fx.Node]:
    """Return the nodes whose operators only move values.

    Nodes without an example tensor get one: ``meta["val"]``.

    Args:
        graph: The graph.
        inputs: An example of each placeholder.
    """
    prober = _Prober(graph)
    prober.run(*inputs, enable_io_processing=False)
    return prober.movements


class _Prober(fx.Interpreter):
    """Runs a graph, and every operator once more on random numbers of the same shapes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.movements: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        if "val" not in n.meta:
            n.meta["val"] = tree_map(_without_values, result)
        if is_aten(n) and _moves(n.target, args, kwargs):
            self.movements.add(n)
        return result


def _without_values(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _moves(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator only moves values, given arguments of the shapes that it gets."""
    if not any(map(_is_float, tree_leaves((args, kwargs)))):
        return False
    for seed, magnitude in enumerate(_MAGNITUDES):
        generator = torch.Generator().manual_seed(seed)

        def draw(leaf: Any, size: float = magnitude, generator: torch.Generator = generator) -> Any:
            if not _is_float(leaf):
                return leaf
            return (size * torch.randn(leaf.shape, generator=generator)).to(leaf)

        drawn = tree_map(draw, (args, kwargs))
        out = target(*drawn[0], **drawn[1])
        if not _are_among(filter(_is_float, tree_leaves(out)), tree_leaves(drawn)):
            return False
    return True


def _are_among(outputs: Iterable[torch.Tensor], inputs: Iterable[Any]) -> bool:
    """Whether the elements of outputs, of which there are some, are elements of inputs or zero."""
    given = [x.flatten() for x in inputs if _is_float(x)]
    results = [x.flatten() for x in outputs]
    if not any(len(x) for x in results) or {x.dtype for x in given} != {x.dtype for x in results}:
        return False
    source = torch.cat([*given, given[0].new_zeros(1)])
    return all(bool(torch.isin(x, source).all()) for x in results)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
