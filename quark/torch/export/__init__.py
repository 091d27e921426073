"""Checkpoints: writing and reading them. Public names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.export.api import ModelExporter as ModelExporter
    from quark.torch.export.api import ModelImporter as ModelImporter
    from quark.torch.export.api import export_gguf as export_gguf
    from quark.torch.export.api import export_onnx as export_onnx
    from quark.torch.export.api import export_safetensors as export_safetensors
    from quark.torch.export.api import (
        import_model_from_safetensors as import_model_from_safetensors,
    )
    from quark.torch.export.config.config import ExporterConfig as ExporterConfig
    from quark.torch.export.config.config import JsonExporterConfig as JsonExporterConfig
    from quark.torch.export.config.config import OnnxExporterConfig as OnnxExporterConfig
    from quark.torch.export.conversion import convert as convert
    from quark.torch.export.graph_program import export_program as export_program
    from quark.torch.export.params import load_params as load_params
    from quark.torch.export.params import save_params as save_params
    from quark.torch.export.recognition import verify as verify

_NAMES = {
    "ExporterConfig": "config.config",
    "JsonExporterConfig": "config.config",
    "OnnxExporterConfig": "config.config",
    "ModelExporter": "api",
    "ModelImporter": "api",
    "convert": "conversion",
    "export_gguf": "api",
    "export_onnx": "api",
    "export_program": "graph_program",
    "export_safetensors": "api",
    "import_model_from_safetensors": "api",
    "load_params": "params",
    "save_params": "params",
    "verify": "recognition",
}
__all__ = sorted(_NAMES)


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
