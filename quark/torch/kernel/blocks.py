"""Schemes of blocks along one axis, and checks of what is given for them."""

from __future__ import annotations

import torch

from quark.torch.numerics.custom_operators import with_text
from quark.torch.numerics.formats import Dtype, Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme

MODES = ("even", "floor", "ceil")
ELEMENTS = (Dtype.fp4, Dtype.fp6_e2m3, Dtype.fp6_e3m2)


def check_mode(mode: str) -> None:
    """Check the rounding mode of exponents.

    Raises:
        ValueError: It is not known.
    """
    if mode not in MODES:
        raise ValueError(f"scale_calculation_mode={mode!r} is unknown: give one of {MODES}.")


def block_scheme(fmt: Format, axis: int, group: int, mode: str = "even") -> Scheme:
    """Return the scheme of blocks of ``group`` elements with power-of-two scales."""
    return with_text(
        Scheme(fmt, QSchemeType.per_group, axis=axis, group=group, scale=E8M0, scale_mode=mode)
    )


def element_format(name: str | Dtype | None) -> Format:
    """Return the format of the elements of MX blocks that is called ``name``.

    Raises:
        ValueError: It is not one of fp4, fp6_e2m3 and fp6_e3m2.
    """
    for member in ELEMENTS:
        if name in (member, member.name):
            fmt: Format = member.value
            return fmt
    names = ", ".join(member.name for member in ELEMENTS)
    raise ValueError(f"Elements of MX blocks are one of {names}; {name!r} was given.")


def check_packed(words: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check packed codes and their biased exponents.

    Raises:
        ValueError: They are not bytes, or the exponents have another shape than ``shape``.
    """
    if (words.dtype, scale.dtype) != (torch.uint8, torch.uint8):
        raise ValueError(
            f"Packed codes and their exponents are uint8; {words.dtype} and {scale.dtype} were "
            "given."
        )
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"Codes of shape {tuple(words.shape)} have exponents of shape {shape}; "
            f"{tuple(scale.shape)} was given."
        )
