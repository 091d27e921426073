"""Pieces of a tensor that fit a CPU cache."""

from __future__ import annotations

import torch


def row_pieces(x: torch.Tensor, elements: int) -> list[torch.Tensor]:
    """Split along the first axis into pieces of about ``elements`` elements, which fit a CPU cache.

    A small tensor, or a tensor on another device, is one piece.
    """
    if x.device.type != "cpu" or x.numel() <= elements:
        return [x]
    return list(torch.split(x, max(1, elements * x.shape[0] // x.numel())))


def join_rows(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Undo ``row_pieces``."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
