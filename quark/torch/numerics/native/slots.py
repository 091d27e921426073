"""Bytes whose slots hold codes of several runs, by kernels."""

from __future__ import annotations

import numpy as np
import torch

from quark.torch.numerics.native.compilation import can_run, run_rows
from quark.torch.numerics.native.slot_kernels import join_slots, split_slots

_EVERY_BYTE = 0x0101010101010101


def find_plane(codes: torch.Tensor, width: int, below: int, added: int) -> torch.Tensor | None:
    """Return bytes with a part of each code in a slot, (rows, bytes), or None without a kernel.

    Args:
        codes: Codes, those for the lowest bits of bytes first, uint8 (rows, 8 / width, bytes).
            There is no kernel for other types.
        width: Bits of a slot: so many of a code are stored.
        below: Bits of a code below those.
        added: What is added to each code first, modulo 256; at most 128.
    """
    if not _is_served(codes):
        return None
    plane = codes.new_empty(len(codes), codes.shape[2])
    constants = np.uint64(added * _EVERY_BYTE), np.uint64(((1 << width) - 1) * _EVERY_BYTE)
    run_rows(join_slots, [_wide(codes), _wide(plane)], width, below, *constants)
    return plane


def read_slots(plane: torch.Tensor, codes: torch.Tensor, width: int, below: int) -> bool:
    """Write the slots of bytes to their bits of codes: the inverse of ``find_plane``.

    Args:
        plane: Bytes, uint8 (rows, bytes).
        codes: uint8 (rows, 8 / width, bytes). Bits from ``below`` on are overwritten.
        width: Bits of a slot.
        below: Bits of a code below those.

    Returns:
        Whether a kernel did so.
    """
    if not _is_served(codes) or not _is_served(plane):
        return False
    low, mask = ((1 << bits) - 1 for bits in (below, width))
    constants = np.uint64(low * _EVERY_BYTE), np.uint64(mask * _EVERY_BYTE)
    run_rows(split_slots, [_wide(codes), _wide(plane)], width, below, *constants)
    return True


def _is_served(x: torch.Tensor) -> bool:
    is_whole = x.shape[-1] % 8 == 0 and x.storage_offset() % 8 == 0
    return is_whole and x.dtype == torch.uint8 and x.is_contiguous() and can_run(x)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint64)
