"""Which fields of a specification go with its granularity."""

from __future__ import annotations

from typing import Any

from quark.torch.numerics.granularity import QSchemeType


def granularity_problem(spec: Any) -> str | None:
    """Return why axis and sizes do not fit the granularity of a specification, or None.

    Args:
        spec: A ``QuantizationSpec`` whose fields have the right types.
    """
    qscheme, size = spec.qscheme, spec.group_size
    if spec.fixes_blocks:
        if spec.ch_axis is None:
            return "an integer ch_axis is missing, got None."
        if size is not None and size <= 0:
            return f"group_size={size}: give the elements of a block (block_size of helpers)."
    elif spec.fmt.scaled and qscheme is None:
        return f"qscheme is missing: give one of {[q.name for q in QSchemeType]}."
    if qscheme in (QSchemeType.per_channel, QSchemeType.per_group) and spec.ch_axis is None:
        return f"{qscheme.name} needs an integer ch_axis, got None."
    if qscheme is QSchemeType.per_group and not _is_size(size):
        return f"per_group needs a positive group_size, or -1 for the whole axis, got {size!r}."
    if (qscheme is QSchemeType.per_block) != (spec.block_size is not None):
        return f"per_block and block_size=(rows, columns) go together, got {spec.block_size!r}."
    if spec.block_size is not None and not all(map(_is_size, spec.block_size)):
        return f"block_size={spec.block_size}: give positive numbers, or -1 for a whole axis."
    return None


def _is_size(size: int | None) -> bool:
    return size is not None and (size > 0 or size == -1)
