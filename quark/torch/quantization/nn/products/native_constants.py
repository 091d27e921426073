"""Constants that kernels of numba take of a packed weight, beside its tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from quark.torch.numerics.formats import Format, TableFormat
from quark.torch.numerics.native.compilation import has_feature
from quark.torch.numerics.native.vectors import FEATURE, HALF, LANES
from quark.torch.quantization.nn.products.arrangement import Parts
from quark.torch.quantization.nn.products.panels import HALF_BITS, HALF_EXPONENT, Panels


def has_vectors(panels: Panels) -> bool:
    """Whether rows are whole vectors whose halves have a scale, and the machine has vectors."""
    to = panels.arrangement
    is_whole = to.half % LANES == 0 if to.half else not (to.inputs % LANES or to.group % HALF)
    return is_whole and has_feature(FEATURE)


def constants_of(panels: Panels, parts: Parts) -> tuple[Any, ...]:
    """Return the constants of a format that kernels take, and numbers that its scales share.

    Those of ``native_vectors`` end with its argument ``halves``.
    """
    flip, numbers = 128 * is_int8(panels.fmt), _numbers(panels, parts)
    if has_vectors(panels):
        halves = numbers if panels.arrangement.group % LANES else None
        return _vector_table(panels, parts, flip, int(numbers[1])), numbers, halves
    shifts = _shifts(panels.fmt) if panels.fmt.is_float else (0, 0)
    return np.array([flip, *shifts], dtype=np.int64), numbers


def _vector_table(panels: Panels, parts: Parts, flip: int, zero: int) -> Any:
    """Return the table of ``row_instructions.decode_row``.

    Args:
        panels: Order and format of the codes.
        parts: Tensors of the weight.
        flip: Bits of codes that are inverted.
        zero: Zero point of all groups, if there are no others.
    """
    fmt = panels.fmt
    constant = 0 if fmt.is_float or "zero_point" in parts else zero
    if fmt.bits <= 4:
        return _value_table(fmt) - np.float32(constant)
    if not fmt.is_float:
        return np.array([flip, constant, 0], dtype=np.int32)
    top, down = _shifts(fmt)
    return np.array([top, down, (0x7FFF >> down) - 0x8000], dtype=np.int16)


def _numbers(panels: Panels, parts: Parts) -> Any:
    """Return the factor of all scales, and the zero point, or the offset of stored zero points."""
    unit = float(parts["tensor_scale"]) if "tensor_scale" in parts else 1.0
    stored = parts.get("zero_point")
    zero = panels.zero_point if stored is None else panels.offset * (stored.dtype != torch.int8)
    return np.array([unit, zero + 128 * is_int8(panels.fmt)], dtype=np.float32)


def is_int8(fmt: Format) -> bool:
    """Whether codes are made unsigned by inverting their sign."""
    return fmt.signed and fmt.bits == 8 and not fmt.is_float


def word_constants(panels: Panels, parts: Parts) -> tuple[Any, Any]:
    """Return the constants that ``native_words`` takes."""
    numbers = _numbers(panels, parts)
    if not panels.fmt.is_float:
        return None, numbers
    table = word_table(panels.fmt)
    assert table is not None
    words, step, zero = table
    return words, np.array([numbers[0] * step, zero], dtype=np.float32)


@cache
def word_table(fmt: Format) -> tuple[Any, Any, Any] | None:
    """Return 16 values as bytes: multiples of a step, less a zero point; None if they are none.

    Returns:
        The bytes twice, as words, int32 (8,); the step; the zero point.
    """
    values = _value_table(fmt)
    step = np.abs(values[values != 0]).min()
    zero = -values.min() / step
    multiples = values / step + zero
    table = multiples.clip(0, 255).astype(np.uint8)
    is_exact = np.array_equal(table, multiples)
    return (np.tile(table, 2).view(np.int32), step, zero) if is_exact else None


def _shifts(fmt: Format) -> tuple[int, int]:
    """Return the places by which the sign moves to the top, and the number moves down then."""
    return HALF_BITS - fmt.bits - (not fmt.signed), HALF_EXPONENT - fmt.exponent_bits


def _value_table(fmt: Format) -> Any:
    """Return the values of 16 stored codes before scales multiply them, float32."""
    if isinstance(fmt, TableFormat):
        return np.resize(np.array(fmt.values, dtype=np.float32), LANES)
    (top, down), codes = _shifts(fmt), np.arange(LANES) % (1 << fmt.bits)
    if not fmt.is_float:
        return codes.astype(np.float32)
    halves = ((codes << top).astype(np.int16) >> down) & np.int16((0x7FFF >> down) - 0x8000)
    return halves.view(np.float16).astype(np.float32)
