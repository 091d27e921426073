"""Which specifications may choose scales of fp4 blocks between 4 and 6."""

from __future__ import annotations

from typing import Any

from quark.torch.quantization.config.type import Dtype, QSchemeType


def four_over_six_problem(spec: Any) -> str | None:
    """Return why a specification cannot choose between 4 and 6 although it asks for it, or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    if not spec.four_over_six:
        return None
    is_grouped = spec.qscheme is QSchemeType.per_group and spec.group_size != -1
    if spec.dtype is not Dtype.fp4 or not is_grouped or not spec.is_dynamic:
        return "four_over_six=True is for dynamic fp4 per group, with a positive group_size."
    if spec.scheme.scale.power_of_two:
        return "four_over_six=True is for scales that are not powers of two."
    return None
