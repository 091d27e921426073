"""Options of an export, under their documented import path."""

from quark.torch.quantization.config.export import (
    ExporterConfig,
    JsonExporterConfig,
    OnnxExporterConfig,
)

__all__ = ["ExporterConfig", "JsonExporterConfig", "OnnxExporterConfig"]
