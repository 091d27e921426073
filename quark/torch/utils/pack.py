"""Packed fp4 and fp6, by the names that serving software imports."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quark.torch.kernel.blocks import element_format
from quark.torch.numerics.codec import decode
from quark.torch.numerics.custom_operators import unpack
from quark.torch.numerics.formats import Dtype, Format


class PackMethod(NamedTuple):
    """How the codes of a format are packed; see ``create_pack_method``."""

    fmt: Format

    def unpack(self, to_unpack: torch.Tensor, reorder: bool = False) -> torch.Tensor:
        """Return the values of packed codes, float32 (…, n).

        Args:
            to_unpack: uint8 (…, n / 2) of fp4, (…, 3 n / 4) of fp6.
            reorder: Accepted for compatibility: these formats have one order.

        Raises:
            ValueError: The tensor is of another type, or the last axis does not hold whole words.
        """
        size = self.fmt.word_codes * self.fmt.bits // 8
        if to_unpack.dtype != torch.uint8 or to_unpack.shape[-1] % size:
            raise ValueError(
                f"Packed {self.fmt.name} is uint8 in words of {size} bytes along the last axis; "
                f"{to_unpack.dtype} of shape {tuple(to_unpack.shape)} was given."
            )
        count = to_unpack.shape[-1] // size * self.fmt.word_codes
        return decode(unpack(to_unpack, self.fmt, count), self.fmt)


def create_pack_method(
    qscheme: str | None, dtype: str | Dtype, mx_element_dtype: str | None = None
) -> PackMethod:
    """Return how the codes of fp4 or fp6 are packed.

    Args:
        qscheme: Accepted for compatibility.
        dtype: ``fp4``, ``fp6_e2m3`` or ``fp6_e3m2``.
        mx_element_dtype: Accepted for compatibility.

    Raises:
        ValueError: The format is not one of these.
    """
    return PackMethod(element_format(dtype))
