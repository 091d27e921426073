"""Which specifications may have signed scales."""

from __future__ import annotations

from typing import Any


def signed_scales_problem(spec: Any) -> str | None:
    """Return why a specification cannot have signed scales although it asks for them, or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    if not spec.signed_scales:
        return None
    if spec.fmt.is_float or spec.scheme.shares_exponents or spec.symmetric is False:
        return "signed_scales=True is for symmetric integers: others reach as far on both sides."
    if spec.scheme.scale.power_of_two or spec.second_stage is not None or spec.is_scale_quant:
        return "signed_scales=True is for scales of one stage that are not powers of two."
    if spec.is_dynamic or spec.range_training is not None:
        return "signed_scales=True is for static weights whose scales are not trained."
    return None
