"""Proof of a rewrite by running: the original and the rewritten graph compute the same values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.fx._pytree import tree_flatten_spec
from torch.linalg import vector_norm
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from quark.torch.graph.trace import iter_tensors

_SEED = 20
# Largest part of its norm by which a rewritten tensor may differ. Rounding in single precision is
# near 1e-6; a batch norm with a wrong channel, axis or sign changes its output by 1e-1 and more.
_TOLERANCE = 1e-4
_ROUNDING = 8  # in half precision, multiples of the distance between 1 and the next number


class Values(NamedTuple):
    """What a run of a graph computed.

    Attributes:
        outputs: Tensors that the graph returned.
        nodes: Values of the nodes that were asked for, by name.
    """

    outputs: list[torch.Tensor]
    nodes: dict[str, Any]


class Samples(NamedTuple):
    """Inputs of a graph, and what it computes from them.

    Attributes:
        inputs: A value for each placeholder.
        values: Outputs, and the values of some nodes.
    """

    inputs: list[Any]
    values: Values


class Proof:
    """Runs graphs on example inputs, and on random inputs with the shapes and ranges of these.

    Args:
        graph: The original graph.
        example_inputs: Arguments of the graph: a tensor, a tuple, or a mapping of
            arguments by name.
        cuts_batch: Whether two samples may stand for the example inputs: see ``two_samples``. The
            graph has no checks of its inputs.

    Raises:
        ValueError: The graph does not run on the inputs. With ``cuts_batch``, the first comparison
            raises it.
    """

    def __init__(self, graph: GraphModule, example_inputs: Any, cuts_batch: bool = False) -> None:
        self._example = flatten_inputs(graph, example_inputs)
        self._inputs: list[list[Any]] = []  # empty until the graph has run
        self._is_cut = False
        if not cuts_batch:
            self._inputs = self._whole_batches(graph)

    def first_sample(self, graph: GraphModule) -> list[Any] | None:
        """Return the first sample of the example inputs, a value for each placeholder.

        None if samples depend on each other, or if the graph takes no batch of one.

        Args:
            graph: The original graph, or one with the same function.
        """
        self._start(graph, ())
        return _first_sample(self._example) if self._is_cut else None

    def find_difference(
        self,
        graph: GraphModule,
        rewritten: GraphModule,
        nodes: Mapping[str, str],
        is_exact: bool = True,
    ) -> str | None:
        """Return how a rewritten graph differs from a graph, or None if it does not.

        Args:
            graph: The graph before the rewrites.
            rewritten: The graph after them.
            nodes: Name of a node of ``graph`` -> name of the node of ``rewritten`` that takes its
                place.
            is_exact: Whether values must be the same; otherwise, only shapes and types.
        """
        known = self._start(graph, nodes)
        for inputs in self._inputs:
            try:
                after = run(rewritten, inputs, nodes.values())
            except Exception as error:
                return f"the rewritten graph fails: {type(error).__name__}: {error}"
            before = run(graph, inputs, nodes) if known is None else known
            for name, place in nodes.items():
                difference = describe_difference(
                    list(iter_tensors(before.nodes[name])),
                    list(iter_tensors(after.nodes[place])),
                    is_exact,
                )
                if difference is not None:
                    return f"{name} {difference}"
            difference = describe_difference(before.outputs, after.outputs, is_exact)
            if difference is not None:
                return f"an output {difference}"
        return None

    def _start(self, graph: GraphModule, nodes: Collection[str]) -> Values | None:
        """Choose the inputs when they are first needed.

        Returns:
            Outputs and the values of the nodes on the inputs, if the choice has computed them.
        """
        if self._inputs:
            return None
        samples = two_samples(graph, self._example, nodes)
        self._is_cut = samples is not None
        self._inputs = self._whole_batches(graph) if samples is None else [samples.inputs]
        return None if samples is None else samples.values

    def _whole_batches(self, graph: GraphModule) -> list[list[Any]]:
        """Return the example inputs and random ones, on which the graph runs."""
        try:
            run(graph, self._example, ())
        except Exception as error:  # anything that a model can raise
            raise ValueError(
                "The graph does not run on the example inputs: "
                f"{type(error).__name__}: {error}. Give inputs like those that it was exported "
                "with."
            ) from error
        random = _randomize(self._example)
        return [self._example, random] if random and _runs(graph, random) else [self._example]


def flatten_inputs(graph: GraphModule, inputs: Any) -> list[Any]:
    """Return the values of the placeholders of a graph for given inputs, in their order.

    Raises:
        ValueError: The graph takes other arguments.
    """
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    spec = graph._in_spec
    # A mapping may name arguments that the graph takes by position.
    codegen: Any = graph.graph._codegen
    names = [name for name in codegen.pytree_info.orig_args if name != "self"]
    if kwargs.keys() == set(names):
        positions, _ = tree_unflatten([None] * spec.num_leaves, spec)
        args = tuple(kwargs.pop(name) for name in names[: len(positions)])
    try:
        values = tree_flatten_spec((tuple(args), kwargs), spec)
        if len(tree_leaves((args, kwargs))) == spec.num_leaves:
            return values
    except (KeyError, IndexError, RuntimeError):  # arguments are missing, or of another structure
        pass
    raise ValueError(
        f"The example inputs do not fit the graph: got {len(args)} arguments and the keywords "
        f"{list(kwargs)}, where it takes {spec}."
    )


def two_samples(
    graph: GraphModule, inputs: Sequence[Any], nodes: Collection[str] = ()
) -> Samples | None:
    """Return a batch of two that stands for a larger one: its first sample, and a random one.

    A graph runs faster with it. None if rows of the batch depend on each other, or if the graph
    takes no other batch.

    Args:
        graph: A graph without checks of its inputs.
        inputs: A value for each placeholder.
        nodes: Names of nodes whose values are returned.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    rows = {x.shape[0] if x.dim() else 0 for x in tensors}
    if len(rows) != 1 or min(rows) <= 2:
        return None
    first = _first_sample(inputs)
    pairs = zip(first, _randomize(first), strict=True)
    both = [torch.cat([x, y]) if isinstance(x, torch.Tensor) else x for x, y in pairs]
    try:
        alone, together = run(graph, first, ()).outputs, run(graph, both, nodes)
    except Exception:  # anything that a model can raise
        return None
    outputs = together.outputs
    has_rows = all(y.shape[:1] == (2,) and bool(y.isfinite().all()) for y in outputs)
    if not has_rows or describe_difference(alone, [y[:1] for y in outputs]) is not None:
        return None
    return Samples(both, together)


def _first_sample(inputs: Sequence[Any]) -> list[Any]:
    return [x[:1] if isinstance(x, torch.Tensor) else x for x in inputs]


@torch.no_grad()
def run(graph: GraphModule, inputs: list[Any], nodes: Collection[str]) -> Values:
    """Run a graph, and return its outputs and the values of some nodes.

    Args:
        graph: The graph. Its buffers are unchanged afterwards.
        inputs: Values of the placeholders. They are not changed.
        nodes: Names of the nodes.
    """
    with _unchanged_buffers(graph):
        recorder = _Recorder(graph, nodes)
        output = recorder.run(*_copy(inputs), enable_io_processing=False)
        return Values(_copy(list(iter_tensors(output))), recorder.values)


class _Recorder(Interpreter):
    """Runs a graph and keeps the values of some nodes: copies, if operations write to tensors."""

    def __init__(self, graph: GraphModule, nodes: Collection[str]) -> None:
        super().__init__(graph)
        self._nodes = set(nodes)
        self._writes = any(
            isinstance(n.target, OpOverload) and n.target._schema.is_mutable
            for n in graph.graph.nodes
        )
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self._nodes:
            self.values[n.name] = _copy(value) if self._writes else value
        return value


def _copy(tree: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


@contextmanager
def _unchanged_buffers(graph: GraphModule) -> Iterator[None]:
    """Restore the buffers that a run writes to, such as statistics and caches."""
    saved = [(buffer, buffer.clone()) for buffer in graph.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)


def _runs(graph: GraphModule, inputs: list[Any]) -> bool:
    """Whether a graph accepts inputs, and computes finite values."""
    try:
        outputs = run(graph, inputs, ()).outputs
    except Exception:  # such as a check of the values of the inputs
        return False
    return not any(bool(x.isnan().any()) for x in outputs)


def _randomize(inputs: list[Any]) -> list[Any]:
    """Return other inputs with the shapes, means and deviations of given ones.

    Indices and masks are permuted, so that they stay within their range.
    """
    generator = torch.Generator().manual_seed(_SEED)

    def random(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.numel():
            return x
        if not x.is_floating_point():
            order = torch.randperm(x.numel(), generator=generator, device="cpu").to(x.device)
            return x.flatten()[order].view(x.shape)
        values = x.float()
        deviation = values.std(correction=0)
        deviation = torch.where(deviation > 0, deviation, torch.ones_like(deviation))
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(
            x.device
        )
        return (values.mean() + noise * deviation).to(x.dtype)

    return [random(x) for x in inputs]


def describe_difference(
    before: list[torch.Tensor], after: list[torch.Tensor], is_exact: bool = True
) -> str | None:
    """Return how two lists of tensors differ, or None if they are the same up to rounding."""
    if [(x.shape, x.dtype) for x in before] != [(x.shape, x.dtype) for x in after]:
        return "has another shape or type"
    for x, y in zip(before, after, strict=True):
        if not is_exact or torch.equal(x, y):
            continue
        x, y = (torch.view_as_real(t) if t.is_complex() else t for t in (x, y))
        eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        x, y = (t if t.dtype in (torch.float32, torch.float64) else t.double() for t in (x, y))
        change, size = (vector_norm(t, dtype=torch.float64) for t in (y - x, x))
        if not (change + size).isfinite():
            # Infinite values, such as those of masks, must be the same.
            change = vector_norm(torch.where(x == y, 0.0, y - x), dtype=torch.float64)
            size = vector_norm(x.nan_to_num(posinf=0.0, neginf=0.0), dtype=torch.float64)
        if not change <= max(_TOLERANCE, _ROUNDING * eps) * size:
            return f"changes by {float(change):.2e}, where its norm is {float(size):.2e}"
    return None
