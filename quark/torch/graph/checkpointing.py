"""Forwards that keep no graph: they run again when gradients pass them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that keeps no graph where gradients are enabled; it may write to its inputs.

    Each run gets copies of tensors, because the second one needs what the first one was given.
    """

    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*map(copy, args), **{name: copy(value) for name, value in kwargs.items()})

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return call
