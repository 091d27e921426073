"""Checkpoints: writing and reading them. Public names load on first use."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "ExporterConfig": "config.config",
    "JsonExporterConfig": "config.config",
    "OnnxExporterConfig": "config.config",
    "ModelExporter": "api",
    "ModelImporter": "api",
    "convert": "conversion",
    "export_gguf": "api",
    "export_onnx": "api",
    "export_safetensors": "api",
    "import_model_from_safetensors": "api",
    "load_params": "params",
    "save_params": "params",
    "verify": "verification",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
