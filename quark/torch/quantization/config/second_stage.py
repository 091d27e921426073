"""Which specifications may have a second stage."""

from __future__ import annotations

from typing import Any


def second_stage_problem(spec: Any) -> str | None:
    """Return why a specification cannot have its second stage, or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    second = spec.second_stage
    if second is None:
        return None
    if not second.is_scale_quant:
        if spec.fmt.scaled and (spec.fmt.is_float or spec.symmetric):
            return None
        return (
            f"second_stage={second.dtype.name} cannot quantize its codes: those of floats with "
            "scales and of symmetric integers have one. Give a first stage such as fp8_e4m3, or "
            "leave out the second."
        )
    if second.fmt.is_float and second.fmt.scaled:
        return None
    return (
        f"second_stage={second.dtype.name} cannot quantize its scales: give a float with scales, "
        "such as fp8_e4m3."
    )
