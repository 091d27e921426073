"""Operations that only move elements: what they do to numbers attached to the elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from quark.torch.graph.trace import WRITTEN_INTO, Op, Value

# Elements keep their values and their places.
_IDENTITY = {"clone", "_to_copy", "detach", "alias", "lift_fresh"}
# Elements keep their values and their order.
_RESHAPE = {"view", "_unsafe_view", "reshape"}
# Elements keep their values: replayed as they are.
_MOVE = {
    *("t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split"),
    *("split_with_sizes", "unbind", "cat", "stack", "index", "index_select", "gather", "repeat"),
    *("repeat_interleave", "flip", "roll"),
}


def is_move(op: Op) -> bool:
    """Whether an operation only moves elements."""
    if op.name in _RESHAPE:
        return not any(isinstance(arg, torch.dtype) for arg in op.args)
    if op.name == WRITTEN_INTO:
        return _lies_in(op)
    return op.name in _IDENTITY or op.name in _MOVE or op.name == "copy"


def replay(op: Op, marks: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Move marks of elements as an operation moves the elements.

    Args:
        op: An operation that only moves elements.
        marks: Number of an input -> its marks, int64 in its shape. Others have the mark -1.

    Returns:
        The marks of each output.
    """
    if op.name == "copy":  # to, from
        target, source = op.args[:2]
        return [_marks(source, marks).expand(target.shape)]
    if op.name == WRITTEN_INTO:
        whole, view, (_, *where) = op.args
        new = _marks(whole, marks).clone(memory_format=torch.contiguous_format)
        new.as_strided(*where).copy_(_marks(view, marks))
        return [new]
    if op.name in _IDENTITY:
        return [_marks(op.args[0], marks)]
    if op.name in _RESHAPE:
        return [_marks(op.args[0], marks).reshape(op.outputs[0].shape)]

    def mark(leaf: Any) -> Any:
        if not isinstance(leaf, Value):
            return leaf
        if leaf.content is not None and leaf.number not in marks:
            return leaf.content.cpu()  # an index
        return _marks(leaf, marks)

    def is_value(leaf: Any) -> bool:
        return isinstance(leaf, Value)

    args, kwargs = tree_map(mark, (op.args, op.kwargs), is_leaf=is_value)
    out = op.func(*args, **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _lies_in(op: Op) -> bool:
    """Whether a tensor that is written to is a part of a contiguous one."""
    whole, _, (stride, shape, view_stride, offset) = op.args
    end = offset + sum((n - 1) * s for n, s in zip(shape, view_stride, strict=True))
    contiguous = torch.empty(whole.shape, device="meta").stride()
    return bool(stride == contiguous and offset >= 0 and end < whole.shape.numel())


def _marks(value: Value, marks: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if value.number in marks:
        return marks[value.number]
    return torch.tensor(-1).expand(value.shape)


def varies(marks: torch.Tensor, dim: int) -> bool:
    """Whether marks differ along a dimension."""
    if marks.shape[dim] <= 1 or marks.stride(dim) == 0:
        return False
    small = compact(marks, keep=dim)
    return not torch.equal(small, small.narrow(dim, 0, 1).expand_as(small))


def compact(marks: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """Return marks with one position along the dimensions they were expanded along."""
    for dim, (size, stride) in enumerate(zip(marks.shape, marks.stride(), strict=True)):
        if stride == 0 and size > 1 and (keep is None or dim != keep % marks.dim()):
            marks = marks.narrow(dim, 0, 1)
    return marks


def along(marks: torch.Tensor, dim: int) -> torch.Tensor | None:
    """Return the marks as a vector along a dimension, or None if they vary along others."""
    if not marks.dim():
        return None
    others = [d for d in range(marks.dim()) if d != dim % marks.dim()]
    if any(varies(marks, d) for d in others) or any(marks.shape[d] == 0 for d in others):
        return None
    for d in reversed(others):
        marks = marks.select(d, 0)
    return marks
