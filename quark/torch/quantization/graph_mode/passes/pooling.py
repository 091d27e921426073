"""Means over space become pooling; large pooling windows are split for devices with a limit.

Example: with at most 64 elements in a window, the mean of 14 × 14 is that of 7 × 7 windows, and
then of 2 × 2 of these.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    insert_call,
    is_call,
    replace,
    shape_of,
)
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass

_ADAPTIVE = {
    4: torch.ops.aten.adaptive_avg_pool2d.default,
    5: torch.ops.aten.adaptive_avg_pool3d.default,
}
_SPLIT = {
    "avg_pool2d": torch.ops.aten.avg_pool2d.default,
    "adaptive_avg_pool2d": torch.ops.aten.avg_pool2d.default,
    "max_pool2d": torch.ops.aten.max_pool2d.default,
}


# ---- means --------------------------------------------------------------------------------------


def _find_means(graph: GraphModule, options: PassOptions) -> Candidates:
    nodes = [n.name for n in graph.graph.nodes if _pooled(n) is not None]
    return Candidates(nodes, {})


def _pooled(node: Node) -> Node | None:
    """Return the image or volume whose mean over space a node is, or None.

    The mean over the rows of a mean over the columns counts too.
    """
    mean = _read_mean(node)
    if mean is None:
        return None
    source, axes, rank = mean
    inner = _read_mean(source) if len(source.users) == 1 else None
    if inner is not None and not arguments(node)["keepdim"] and not arguments(source)["keepdim"]:
        # Example: x.mean(3).mean(2): axes {3} of rank 4, then {2} of [0, 1, 2], which is 2.
        source, inner_axes, rank = inner
        rest = [axis for axis in range(rank) if axis not in inner_axes]
        axes = inner_axes | {rest[axis] for axis in axes}
    return source if rank in _ADAPTIVE and axes == set(range(2, rank)) else None


def _read_mean(node: Node) -> tuple[Node, set[int], int] | None:
    """Return what a mean reads, its axes and the rank; None if it is something else."""
    if not is_call(node, "mean"):
        return None
    given = arguments(node)
    shape = shape_of(given["self"])
    if not given.get("dim") or given["dtype"] is not None or shape is None:
        return None
    return given["self"], {axis % len(shape) for axis in given["dim"]}, len(shape)


def _pool(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    source = _pooled(node)
    rank = len(shape_of(source) or ())
    result = insert_call(node, _ADAPTIVE[rank], source, [1] * (rank - 2))
    if not arguments(node)["keepdim"]:
        result = insert_call(node, torch.ops.aten.flatten.using_ints, result, 1)
    replace(node, result)
    return result


# ---- large windows ------------------------------------------------------------------------------


def _find_large(graph: GraphModule, options: PassOptions) -> Candidates:
    candidates = Candidates([], {})
    for node in graph.graph.nodes:
        if options.largest_pool is not None and is_call(node, *_SPLIT):
            window = _window(node)
            if isinstance(window, str):
                candidates.left[node.name] = window
            elif prod(window) > options.largest_pool:
                if _split(window, options.largest_pool) is None:
                    reason = f"no divisors of {window} give windows of {options.largest_pool}"
                    candidates.left[node.name] = reason
                else:
                    candidates.nodes.append(node.name)
    return candidates


def _window(node: Node) -> tuple[int, int] | str:
    """Return height and width of windows that cover an image once, or why they do not."""
    given, shape = arguments(node), shape_of(arguments(node)["self"]) or ()
    size = shape[-2:]
    if is_call(node, "adaptive_avg_pool2d"):
        windows = [
            i // o if isinstance(i, int) and i % o == 0 else 0
            for i, o in zip(size, given["output_size"], strict=True)
        ]
        return (windows[0], windows[1]) if all(windows) else "its windows are not all of one size"
    window, stride = _pair(given["kernel_size"]), _pair(given["stride"] or given["kernel_size"])
    is_plain = not any(_pair(given["padding"])) and not given["ceil_mode"]
    is_plain = is_plain and set(_pair(given.get("dilation", 1))) == {1}
    if stride != window or not is_plain or given.get("divisor_override") is not None:
        return "its windows overlap, or reach beyond the image"
    return window


def _pair(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value)
    return values[0], values[-1]


def _split(window: tuple[int, int], limit: int) -> list[tuple[int, int]] | None:
    """Return windows of at most ``limit`` elements, whose product is a window; None if none are.

    Example: (14, 14) with 64 -> [(7, 7), (2, 2)], (6, 1) with 3 -> [(3, 1), (2, 1)].
    """
    if prod(window) <= limit:
        return [window]
    parts = [(h, w) for h in _divisors(window[0]) for w in _divisors(window[1]) if h * w <= limit]
    first = max(parts, key=lambda part: (prod(part), -abs(part[0] - part[1])))
    if first == (1, 1):
        return None
    rest = _split((window[0] // first[0], window[1] // first[1]), limit)
    return None if rest is None else [first, *rest]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _split_pool(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    window = _window(node)
    result: Node = arguments(node)["self"]
    assert not isinstance(window, str) and options.largest_pool is not None
    [target] = [target for name, target in _SPLIT.items() if is_call(node, name)]
    for part in _split(window, options.largest_pool) or ():
        result = insert_call(node, target, result, list(part), list(part))
    replace(node, result)
    return result


POOL_MEANS = Pass("make a mean over space a pooling", _find_means, _pool)
SPLIT_LARGE_POOLS = Pass("split a large pooling window", _find_large, _split_pool)
