"""Tools for both proofs: outputs of a replayed part of a model, compared in single precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
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
