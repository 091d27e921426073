"""Observers: statistics of the tensors that pass by. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.quantization.observer.observer import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return a documented observer, so that scripts import it from here too."""
    from importlib import import_module

    registry = import_module("quark.torch.quantization.observer.registry")
    if name == "ObserverBase" or name in registry.OBSERVERS:
        return getattr(import_module("quark.torch.quantization.observer.observer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
