"""Which specifications may have scales in super-blocks."""

from __future__ import annotations

from typing import Any

from quark.torch.numerics.granularity import QSchemeType


def super_block_problem(spec: Any) -> str | None:
    """Return why a specification cannot have its scales in super-blocks, or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    to = spec.scheme.scale
    if not to.span:
        return None
    given = f"scale_format={spec.scale_format!r}"
    if spec.fmt.is_float or spec.qscheme is not QSchemeType.per_group:
        return f"{given} is for groups of integers: give an integer dtype and qscheme='per_group'."
    if spec.is_dynamic or spec.range_training or spec.second_stage is not None:
        return f"{given} is for static scales of one stage that are not trained."
    signed = spec.fmt.signed or to.fmt.signed
    if spec.symmetric is False and (signed or not spec.scheme.float_zero_point):
        return (
            f"{given} with symmetric=False needs zero_point_type='float32', an unsigned dtype, and "
            "unsigned integers such as those of uint6x8."
        )
    return None
