"""Bytes of codes, and of the factors of super-blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor | None]  # factors of scales, and of minima if there are any


def join_plane(codes: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return some bits of the codes of a block as bytes.

    ``width`` bytes lie side by side. Their lowest fields have the first ``width`` elements, their
    next fields the next elements. Example, 4 bits and a width of 16: byte 0 has element 0 in its
    low half and element 16 in its high half, byte 15 the elements 15 and 31.

    Args:
        codes: (…, elements) uint8, less than 2^bits.
        bits: Bits of a field.
        width: Bytes side by side.

    Returns:
        (…, elements * bits / 8) uint8.
    """
    fields = codes.reshape(*codes.shape[:-1], -1, 8 // bits, width)
    joined = fields[..., 0, :].clone()
    for number in range(1, 8 // bits):
        joined |= fields[..., number, :] << (bits * number)
    return joined.flatten(-2)


def split_plane(body: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Return the codes of bytes: the inverse of ``join_plane``."""
    rows = body.reshape(*body.shape[:-1], -1, 1, width)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=body.device).unsqueeze(-1)
    return (rows >> shifts & ((1 << bits) - 1)).flatten(-3)


def _join_nibbles(scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
    assert minima is not None
    return scales | minima << 4


def _split_nibbles(stored: torch.Tensor) -> Pair:
    return stored & 15, stored >> 4


def _join_sixes(scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
    """Return 16 integers of 6 bits in 12 bytes: their low 4 bits, then their high 2 bits."""
    stored = scales + 32 & 63
    return torch.cat([join_plane(stored & 15, 4, 8), join_plane(stored >> 4, 2, 4)], -1)


def _split_sixes(stored: torch.Tensor) -> Pair:
    low, high = split_plane(stored[..., :8], 4, 8), split_plane(stored[..., 8:], 2, 4)
    return (low | high << 4) - 32, None  # the difference of bytes, read as signed


def _join_six_pairs(scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
    """Return 8 pairs of 6 bits in 12 bytes.

    Bytes 0 to 3 have the first four factors of scales in their low 6 bits, bytes 4 to 7 those of
    minima. Bytes 8 to 11 have the low 4 bits of the other factors, those of minima in the high
    half. The high 2 bits of these are the high bits of bytes 0 to 7.
    """
    assert minima is not None
    near, far = torch.split(torch.stack([scales, minima], -2), 4, -1)  # (…, 2, 4) each
    first = near | far >> 4 << 6
    return torch.cat([first.flatten(-2), far[..., 0, :] & 15 | (far[..., 1, :] & 15) << 4], -1)


def _split_six_pairs(stored: torch.Tensor) -> Pair:
    first, last = stored[..., :8].reshape(*stored.shape[:-1], 2, 4), stored[..., 8:]
    low = torch.stack([last & 15, last >> 4], -2)
    both = torch.cat([first & 63, low | first >> 6 << 4], -1)
    return both[..., 0, :], both[..., 1, :]


def _join_bytes(scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
    return scales


def _split_bytes(stored: torch.Tensor) -> Pair:
    return stored, None


# scale_format -> (factors as bytes, bytes as factors). Factors are bytes, signed ones in two's
# complement: scales (…, groups) uint8, and minima like them or None.
FACTORS: dict[
    str,
    tuple[
        Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], Callable[[torch.Tensor], Pair]
    ],
] = {
    "uint4x16": (_join_nibbles, _split_nibbles),
    "int6x16": (_join_sixes, _split_sixes),
    "uint6x8": (_join_six_pairs, _split_six_pairs),
    "int8x16": (_join_bytes, _split_bytes),
}
