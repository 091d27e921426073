"""Evaluation mode of a model, caches included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch off dropout and key-value caches, and restore the state of each module afterwards."""
    modes = {module: module.training for module in model.modules()}
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    cached = [c for c in configs.values() if getattr(c, "use_cache", False)]
    model.eval()
    for config in cached:
        config.use_cache = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for config in cached:
            config.use_cache = True
