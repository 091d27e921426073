"""Replay of a part of a model: modules with another ``forward``, outputs in single precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from quark.torch.graph.trace import iter_tensors

# A proof fails if the error of the complete edit exceeds this part of the change that an
# incomplete edit (the control) causes. Example: rescaling the producer alone moves the output by
# 5.0, rescaling producer and consumers by 4e-6 (rounding): 4e-6 <= 1e-3 · 5.0, proved.
TOLERANCE = 1e-3


def output_distance(tensors: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean distance of two lists of tensors, NaN if it is not finite."""
    pairs = zip(tensors, reference, strict=True)
    total = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return math.sqrt(total) if math.isfinite(total) else math.nan


def float_tensors(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in nested lists, tuples and mappings."""
    return [t for t in iter_tensors(output) if t.is_floating_point()]


def is_half(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in half precision: float16 or bfloat16."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def upcast_half(tree: Any) -> Any:
    """Return nested tensors with float16 and bfloat16 converted to float32."""
    return tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and is_half(t) else t, tree)


@contextmanager
def replace_forwards(
    model: nn.Module, forwards: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Replace the ``forward`` of modules while the context is open.

    Args:
        model: The model.
        forwards: Name of a module -> its ``forward``.
    """
    modules = {name: model.get_submodule(name) for name in forwards}
    previous = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = forwards[name]
    try:
        yield
    finally:
        for name, module in modules.items():
            del module.forward
            forward = previous[name]
            if forward is not None:
                module.forward = forward
