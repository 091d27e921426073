"""Which specifications may have a scale per head."""

from __future__ import annotations

from typing import Any

from quark.torch.numerics.granularity import QSchemeType


def per_head_problem(spec: Any) -> str | None:
    """Return why a specification cannot have a scale per head, or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    if spec.qscheme is not QSchemeType.per_head:
        return None
    size = spec.group_size
    if size is not None and size <= 0:
        return f"group_size={size!r}: give the channels of a head, or None for those of the model."
    if spec.ch_axis not in (None, -1):
        return f"heads divide the last axis: leave out ch_axis={spec.ch_axis!r}."
    if spec.second_stage is not None or spec.fixes_blocks or not spec.fmt.scaled:
        return "per_head is for formats with one scale for each block, in one stage."
    if spec.range_training is not None:
        return "scales per head do not train: use qscheme='per_tensor'."
    return None
