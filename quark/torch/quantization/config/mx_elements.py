"""Which specifications may have which elements of MX blocks."""

from __future__ import annotations

from typing import Any

from quark.torch.quantization.config.serialize import plain
from quark.torch.quantization.config.type import Dtype

MX_ELEMENTS = ("int8", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4")


def mx_element_problem(spec: Any) -> str | None:
    """Return why a specification cannot have its element type, or lacks one; or None.

    Args:
        spec: A ``QuantizationSpec`` whose other fields are checked.
    """
    element = spec.mx_element_dtype
    if (spec.dtype is Dtype.mx) != (element is not None):
        return f"mx_element_dtype={plain(element)!r}: dtype mx needs it, no other has it."
    if element is not None and element.name not in MX_ELEMENTS:
        return f"mx_element_dtype={plain(element)!r}: give one of {MX_ELEMENTS}."
    return None
