"""Operations that only move elements, and how they move labels attached to the elements.

Labels are an int64 tensor in the shape of a tensor: one number per element, -1 for none. To learn
where ``x.transpose(0, 1)[1:]`` takes its elements from, the same operations run on the labels:

    labels                [[0, 1], [2, 3]]
    transpose(0, 1)       [[0, 2], [1, 3]]
    [1:]                  [[1, 3]]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from quark.torch.graph.trace import VIEW_WRITE, Op, Value

# Elements keep their values and their places.
_IDENTITY = {"clone", "_to_copy", "detach", "alias", "lift_fresh"}
# Elements keep their values and their order.
_RESHAPE = {"view", "_unsafe_view", "reshape"}
# Elements keep their values: the operation runs on the labels.
_MOVE = {
    *("t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split"),
    *("split_with_sizes", "unbind", "cat", "stack", "index", "index_select", "gather", "repeat"),
    *("repeat_interleave", "flip", "roll"),
}


def is_move(op: Op) -> bool:
    """Whether an operation only moves elements."""
    if op.name in _RESHAPE:
        return not any(isinstance(arg, torch.dtype) for arg in op.args)
    if op.name == VIEW_WRITE:
        return _is_part_of_base(op)
    return op.name in _IDENTITY or op.name in _MOVE or op.name == "copy"


def move_labels(op: Op, labels: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Move labels of elements as an operation moves the elements.

    Args:
        op: An operation for which `is_move` holds.
        labels: Number of an input -> its labels, int64 in its shape. Elements of other inputs have
            the label -1.

    Returns:
        The labels of each output.
    """
    if op.name == "copy":  # to, from
        target, source = op.args[:2]
        return [_get_labels(source, labels).expand(target.shape)]
    if op.name == VIEW_WRITE:
        # Example: x (4,) labeled -1, and x[1:3] = y with y labeled 7, 8: view of shape (2,),
        # stride (1,), offset 1 -> x is labeled -1, 7, 8, -1.
        base, view, (_, *region) = op.args
        new = _get_labels(base, labels).clone(memory_format=torch.contiguous_format)
        new.as_strided(*region).copy_(_get_labels(view, labels))
        return [new]
    if op.name in _IDENTITY:
        return [_get_labels(op.args[0], labels)]
    if op.name in _RESHAPE:
        return [_get_labels(op.args[0], labels).reshape(op.outputs[0].shape)]

    def label(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        if leaf.content is not None and leaf.number not in labels:
            return leaf.content.cpu()  # an index
        return _get_labels(leaf, labels)

    def is_value(leaf: Any) -> bool:
        return isinstance(leaf, Value)

    args, kwargs = tree_map(label, (op.args, op.kwargs), is_leaf=is_value)
    out = op.func(*args, **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _is_part_of_base(op: Op) -> bool:
    """Whether a view that was written to lies within a contiguous base tensor."""
    base, _, (stride, shape, view_stride, offset) = op.args
    end = offset + sum((n - 1) * s for n, s in zip(shape, view_stride, strict=True))
    contiguous = torch.empty(base.shape, device="meta", dtype=torch.float32).stride()
    return bool(stride == contiguous and offset >= 0 and end < base.shape.numel())


def _get_labels(value: Value, labels: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if value.number in labels:
        return labels[value.number]
    return torch.tensor(-1, device="cpu").expand(value.shape)


def labels_vary(labels: torch.Tensor, dim: int) -> bool:
    """Whether labels differ along a dimension."""
    if labels.shape[dim] <= 1 or labels.stride(dim) == 0:
        return False
    small = unexpand_labels(labels, keep=dim)
    return not torch.equal(small, small.narrow(dim, 0, 1).expand_as(small))


def unexpand_labels(labels: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """Undo ``expand``: return labels with size 1 along dimensions of stride 0, except ``keep``."""
    for dim, (size, stride) in enumerate(zip(labels.shape, labels.stride(), strict=True)):
        if stride == 0 and size > 1 and (keep is None or dim != keep % labels.dim()):
            labels = labels.narrow(dim, 0, 1)
    return labels


def project_labels(labels: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the labels as a vector along a dimension, or None if they vary along others.

    Example: [[4, 5], [4, 5]] along dimension 1 -> [4, 5]; along dimension 0 -> None.
    """
    if not labels.dim():
        return None
    others = [d for d in range(labels.dim()) if d != dim % labels.dim()]
    if any(labels_vary(labels, d) for d in others) or any(labels.shape[d] == 0 for d in others):
        return None
    for d in reversed(others):
        labels = labels.select(d, 0)
    return labels
