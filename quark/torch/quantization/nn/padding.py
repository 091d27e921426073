"""Padding in the tensors that pass through a model, which no statistics count.

A mask belongs to a batch. It applies to every tensor whose first axes are those of the mask, or its
axes flattened. Example: a mask (2, 12) applies to (2, 12, 64), to (2, 12, 4, 16) and to (24, 64).
A layer of experts replaces it by the masks of the tokens that are sent to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_masks: ContextVar[tuple[torch.Tensor, ...]] = ContextVar("masks", default=())


@contextmanager
def padding(*masks: torch.Tensor | None) -> Iterator[None]:
    """Let masks tell which tokens of the tensors inside the context are not padding.

    Args:
        masks: (sequences, tokens) or (tokens,) bool. The first that applies to a tensor counts.
            None is left out.
    """
    token = _masks.set(tuple(mask for mask in masks if mask is not None))
    try:
        yield
    finally:
        _masks.reset(token)


def switch_padding(*masks: torch.Tensor | None) -> None:
    """Replace the masks of the innermost ``padding``, until it ends."""
    _masks.set(tuple(mask for mask in masks if mask is not None))


def mask_of(x: torch.Tensor) -> torch.Tensor | None:
    """Return which entries along the first axis or axes of a tensor are not padding; None for all.

    Args:
        x: (sequences, tokens, ...) or (tokens, ...).

    Returns:
        (sequences, tokens) or (tokens,) bool, on the device of ``x``.
    """
    for mask in _masks.get():
        if x.dim() > mask.dim() and x.shape[: mask.dim()] == mask.shape:
            return mask.to(x.device)
        if x.dim() > 1 and len(x) == mask.numel():
            return mask.flatten().to(x.device)
    return None


def without_padding(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor without padding, and with as many axes as before.

    Example: (2, 12, 64) with 20 tokens that are not padding -> (1, 20, 64); (24, 64) -> (20, 64).
    """
    mask = mask_of(x)
    if mask is None:
        return x
    tokens = x[mask]
    return tokens.unsqueeze(0) if mask.dim() == 2 else tokens
