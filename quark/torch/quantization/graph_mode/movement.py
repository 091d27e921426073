"""Operators of a graph that only move values, such as reshape, max pooling and concatenation.

Each operator is run on random numbers. It moves values if every element of its results is an
element of its inputs, or zero. Values on the grid of a quantizer stay on it then, so the results
share the scale of the inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from quark.torch.quantization.graph_mode.nodes import is_aten

# Limits of activations, such as 6 of ReLU6, are among the inputs in neither or one of these.
_MAGNITUDES = (0.5, 1000.0)
_VALUES = 8  # distinct numbers that are drawn; more take longer to look up
# Elementwise operators on tensors with more elements get the first so many of each axis.
_ELEMENTS, _AXIS = 2**16, 32


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
        self._known: dict[str, bool] = {}  # an operator with shapes -> whether it moves values

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = super().run_node(n)
        if "val" not in n.meta:
            n.meta["val"] = tree_map(_without_values, result)
        if is_aten(n) and self._moves(n, args, kwargs):
            self.movements.add(n)
        return result

    def _moves(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        def describe(leaf: Any) -> Any:
            if _is_float(leaf):
                return str((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
            return n.name if isinstance(leaf, torch.Tensor) else leaf  # values count, as of indices

        key = str((n.target, *tree_map(describe, (args, kwargs))))
        if key not in self._known:
            self._known[key] = _moves(n.target, args, kwargs)
        return self._known[key]


def _without_values(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _moves(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator only moves values, given arguments of the shapes that it gets."""
    if not any(map(_is_float, tree_leaves((args, kwargs)))):
        return False
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(_VALUES, generator=generator, dtype=torch.float32, device="cpu")

    limit = _axis_limit(target, [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)])

    def draw(leaf: Any) -> Any:
        if not _is_float(leaf):
            return leaf
        shape = [min(size, limit) for size in leaf.shape]
        return torch.randint(_VALUES, shape, generator=generator, device="cpu").to(leaf.device)

    drawn = tree_map(draw, (args, kwargs))
    return all(_moves_grid(target, (args, kwargs), drawn, m * numbers) for m in _MAGNITUDES)


def _axis_limit(target: Any, tensors: Sequence[torch.Tensor]) -> int:
    """Return how many elements of each axis show what an operator does."""
    is_elementwise = torch.Tag.pointwise in target.tags and all(map(_is_float, tensors))
    largest = max(x.numel() for x in tensors)
    return _AXIS if is_elementwise and largest > _ELEMENTS else sys.maxsize


def _moves_grid(target: Any, given: Any, drawn: Any, grid: torch.Tensor) -> bool:
    """Whether the results of an operator for inputs of a few values have these values.

    Args:
        target: The operator.
        given: Its arguments and keyword arguments.
        drawn: The same, where tensors of floats are indices of the values.
        grid: (values,).
    """

    def look_up(leaf: Any, index: Any) -> Any:
        return grid.to(leaf)[index] if _is_float(leaf) else leaf

    args, kwargs = tree_map(look_up, given, drawn)
    results = [x for x in tree_leaves(target(*args, **kwargs)) if _is_float(x)]
    types = {x.dtype for x in [*results, *filter(_is_float, tree_leaves(given))]}
    if len(types) != 1 or not any(x.numel() for x in results):
        return False
    known = torch.cat([grid, grid.new_zeros(1)])
    return all(_has_only(x, known.to(x)) for x in results)


def _has_only(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether every element of a tensor is one of a few values."""
    is_known = x == values[0]  # torch.isin takes twice the time
    for value in values[1:]:
        is_known |= x == value
    return bool(is_known.all())


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
