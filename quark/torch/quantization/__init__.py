"""Quantization of PyTorch models. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.quantization.api import ModelQuantizer as ModelQuantizer
    from quark.torch.quantization.config.config import *  # noqa: F403


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        # A submodule of this name is being imported: it is not a public name of the configuration.
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "api" if name == "ModelQuantizer" else "config.config"
        try:
            return getattr(import_module(f"{__name__}.{module}"), name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
