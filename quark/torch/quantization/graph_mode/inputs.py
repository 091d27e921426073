"""Inputs of a graph: examples of them, and calibration data in the shapes that it takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_unflatten

from quark.torch.pipeline.batches import WholeBatches, flatten_batches
from quark.torch.pipeline.chunks import Chunks

_DYNAMIC = (
    "export it with dynamic_shapes, such as {{{name!r}: {{0: torch.export.Dim('batch')}}}}, or "
    "give batches of {rows} rows."
)


def placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of the inputs of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def example_inputs(graph: fx.GraphModule, batches: Iterable[Any]) -> tuple[Any, ...]:
    """Return a value for each input of a graph: of the first batch, else random values.

    Args:
        graph: An exported graph.
        batches: Batches of ``fit_batches``.
    """
    first = next(flatten_batches(batches), None)
    if first is not None:
        device = next((p.device for p in graph.parameters()), None)
        values = _values(graph, first)
        return tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)
    generator = torch.Generator().manual_seed(0)
    return tuple(_example(node.meta["val"], generator) for node in placeholders(graph))


def example_arguments(
    graph: fx.GraphModule, batches: Iterable[Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and keyword arguments for a call of a graph; see ``example_inputs``.

    Args:
        graph: An exported graph.
        batches: Calibration data that the graph takes, or None.
    """
    data = () if batches is None else fit_batches(graph, batches)
    args, kwargs = tree_unflatten(list(example_inputs(graph, data)), graph._in_spec)
    return args, kwargs


def _example(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_size(n) for n in value.shape]
    if value.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(
            value.device, value.dtype
        )
    return torch.ones(shape, dtype=value.dtype, device=value.device)


def _size(size: int | torch.SymInt) -> int:
    """Return a size, of any size that of the example that the graph was exported with."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 2


def fit_batches(graph: fx.GraphModule, batches: Iterable[Any]) -> Iterable[Any]:
    """Return calibration data as a graph takes it.

    A graph with batches of any size takes chunks, as other models do. One that was exported for a
    fixed batch takes batches of this size, into which the data is cut.

    Args:
        graph: An exported graph.
        batches: Batches that can be iterated any number of times.

    Raises:
        ValueError: A batch has another number, type or shape of tensors, or values that are
            NaN or infinite. The message has the index of the batch, and what the graph takes.
    """
    rows = _fixed_rows(graph)
    misfit = None
    if rows is not None:
        cut = Chunks(batches, sequences=rows, tokens=sys.maxsize)
        if next(_misfits(graph, cut), None) is None:
            return WholeBatches(cut)
        misfit = next(_misfits(graph, batches, any_rows=True), None)
    misfit = misfit or next(_misfits(graph, batches), None)
    if misfit is not None:
        raise ValueError(misfit)
    return Chunks(batches) if rows is None else WholeBatches(batches)


def check_arguments(
    graph: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Check that a graph takes arguments.

    Raises:
        TypeError: The arguments are no tuple, or the keyword arguments no mapping.
        ValueError: The graph takes another number, type or shape of tensors.
    """
    if not isinstance(args, tuple):
        raise TypeError(
            f"args: expected a tuple of arguments, as (x,), got a {type(args).__name__}."
        )
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(
            "kwargs: expected a mapping of arguments, as {'x': x}, got a "
            f"{type(kwargs).__name__}."
        )
    nodes, values = placeholders(graph), tree_leaves((args, dict(kwargs or {})))
    if len(values) != len(nodes):
        names = ", ".join(node.name for node in nodes)
        raise ValueError(f"The graph takes {len(nodes)} inputs ({names}), got {len(values)}.")
    for node, value in zip(nodes, values, strict=True):
        problem = _misfit(node, value)
        if problem is not None:
            raise ValueError(f"The arguments do not fit the graph: {problem}")


def _fixed_rows(graph: fx.GraphModule) -> int | None:
    """Return the size of the first axis of all inputs; None if it is not one, or not fixed."""
    values = [node.meta["val"] for node in placeholders(graph)]
    sizes = [v.shape[0] for v in values if isinstance(v, torch.Tensor) and v.dim()]
    is_fixed = bool(sizes) and all(isinstance(size, int) for size in sizes)
    return int(sizes[0]) if is_fixed and len(set(sizes)) == 1 else None


def _misfits(
    graph: fx.GraphModule, batches: Iterable[Any], any_rows: bool = False
) -> Iterator[str]:
    """Iterate over what is wrong with batches, as messages.

    Args:
        graph: An exported graph.
        batches: The batches.
        any_rows: Whether the first axis may have any size, since batches are cut there.
    """
    nodes = placeholders(graph)
    for index, batch in enumerate(flatten_batches(batches)):
        values = _values(graph, batch)
        if len(values) != len(nodes):
            names = ", ".join(node.name for node in nodes)
            yield (
                f"Batch {index} of the dataloader has {len(values)} values, but the graph takes "
                f"{len(nodes)}: {names}."
            )
            return
        for node, value in zip(nodes, values, strict=True):
            problem = _misfit(node, value, any_rows)
            if problem is None and not _is_defined(value):
                problem = f"{node.name} has values that are NaN or infinite: leave them out."
            if problem is not None:
                yield f"Batch {index} of the dataloader: {problem}"
                return


def _is_defined(value: Any) -> bool:
    """Whether no value is NaN or infinite; masks may hold -infinity."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    return not bool((value.isnan() | value.isposinf()).any())


def _misfit(node: fx.Node, value: Any, any_rows: bool = False) -> str | None:
    expected = node.meta["val"]
    if not isinstance(expected, torch.Tensor):
        return None
    if not isinstance(value, torch.Tensor):
        return f"{node.name} is a {type(value).__name__}, but the graph takes a tensor."
    if value.dtype != expected.dtype:
        return f"{node.name} is {value.dtype}, but the graph takes {expected.dtype}: convert it."
    fixed = [
        size if isinstance(size, int) and not (any_rows and axis == 0) else None
        for axis, size in enumerate(expected.shape)
    ]
    differs = [
        axis
        for axis, size in enumerate(fixed)
        if value.dim() == len(fixed) and size not in (None, value.shape[axis])
    ]
    if value.dim() == len(fixed) and not differs:
        return None
    taken = ", ".join("any" if size is None else str(size) for size in fixed)
    text = f"{node.name} has the shape {tuple(value.shape)}, but the graph takes ({taken})"
    if differs == [0]:
        return f"{text}: {_DYNAMIC.format(name=node.name, rows=fixed[0])}"
    return f"{text}: give data of this shape, or export the graph for that of the data."


def _values(graph: fx.GraphModule, batch: Any) -> list[Any]:
    """Return the values of a batch, in the order of the inputs of a graph.

    Raises:
        ValueError: A mapping lacks an input.
    """
    if not hasattr(batch, "items"):
        return tree_leaves([batch] if isinstance(batch, torch.Tensor) else list(batch))
    info = getattr(graph.graph._codegen, "pytree_info", None)
    names = [n for n in info.orig_args if n != "self"] if info is not None else []
    names = names or [node.name for node in placeholders(graph)]
    missing = [name for name in names if name not in batch]
    if missing or len(batch) != len(names):
        raise ValueError(
            f"The dataloader has {', '.join(map(str, batch))}, but the graph takes "
            f"{', '.join(names)}."
        )
    return tree_leaves([batch[name] for name in names])
