"""Kernels that put codes of several runs into slots of bytes, eight bytes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import native_function

Array = Any


@native_function
def join_slots(
    codes: Array, plane: Array, width: int, below: int, added: np.uint64, mask: np.uint64
) -> None:
    """Put some bits of codes into the slots of bytes.

    Args:
        codes: Eight codes of a byte in each number, uint64 (rows, slots, numbers).
        plane: Eight bytes in each number, uint64 (rows, numbers), overwritten.
        width: Bits of a slot.
        below: Lowest bit of a code that is stored.
        added: Number up to 128 that is added to every code first, in each byte.
        mask: Lowest ``width`` bits of each byte.
    """
    highest, down = np.uint64(0x80) * np.uint64(0x0101010101010101), np.uint64(below)
    for row in range(codes.shape[0]):
        for slot in range(codes.shape[1]):
            up = np.uint64(width * slot)
            for i in range(codes.shape[2]):
                code = codes[row, slot, i]
                # Bytes are added without their highest bits, so that none carries to the next.
                code = ((code & ~highest) + (added & ~highest)) ^ ((code ^ added) & highest)
                stored = (code >> down & mask) << up
                plane[row, i] = stored if slot == 0 else plane[row, i] | stored


@native_function
def split_slots(
    codes: Array, plane: Array, width: int, below: int, low: np.uint64, mask: np.uint64
) -> None:
    """Write the slots of bytes to their bits of codes: the inverse of ``join_slots``.

    Args:
        codes: uint64 (rows, slots, numbers). Bits from ``below`` on are overwritten.
        plane: uint64 (rows, numbers).
        width: Bits of a slot.
        below: Lowest bit of a code that is stored in the slots.
        low: Bits of each byte below that one, which are kept.
        mask: Lowest ``width`` bits of each byte.
    """
    up = np.uint64(below)
    for row in range(codes.shape[0]):
        for slot in range(codes.shape[1]):
            down = np.uint64(width * slot)
            for i in range(codes.shape[2]):
                stored = (plane[row, i] >> down & mask) << up
                # New memory is not read: that would fetch each of its pages twice.
                codes[row, slot, i] = (codes[row, slot, i] & low) | stored if low else stored
