"""Quark for PyTorch. Public names load on first use: importing this package costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.diffusion import export_pipeline as export_pipeline
    from quark.torch.diffusion import load_pipeline as load_pipeline
    from quark.torch.diffusion import quantize_pipeline as quantize_pipeline
    from quark.torch.export.api import ModelExporter as ModelExporter
    from quark.torch.export.api import ModelImporter as ModelImporter
    from quark.torch.export.api import export_gguf as export_gguf
    from quark.torch.export.api import export_onnx as export_onnx
    from quark.torch.export.api import export_safetensors as export_safetensors
    from quark.torch.export.api import (
        import_model_from_safetensors as import_model_from_safetensors,
    )
    from quark.torch.export.diffusers_loading import (
        register_with_diffusers as register_with_diffusers,
    )
    from quark.torch.export.params import load_params as load_params
    from quark.torch.export.params import save_params as save_params
    from quark.torch.numerics.custom_operators import (
        register_custom_operators as register_custom_operators,
    )
    from quark.torch.pipeline.journal import Journal as Journal
    from quark.torch.quantization.api import ModelQuantizer as ModelQuantizer
    from quark.torch.quantization.config.template import LLMTemplate as LLMTemplate
    from quark.torch.quantization.config.type import QuantFlow as QuantFlow
    from quark.torch.quantization.nn.runtime import RuntimeOptions as RuntimeOptions
    from quark.torch.quantization.nn.runtime import (
        disable_native_inference as disable_native_inference,
    )
    from quark.torch.quantization.nn.runtime import (
        enable_native_inference as enable_native_inference,
    )
    from quark.torch.quantization.nn.runtime import set_runtime as set_runtime
    from quark.torch.statistics.collection import collect_statistics as collect_statistics
    from quark.torch.statistics.files import load_statistics as load_statistics
    from quark.torch.statistics.files import save_statistics as save_statistics
    from quark.torch.statistics.merging import merge_statistics as merge_statistics

_NAMES = {
    "Journal": "pipeline.journal",
    "LLMTemplate": "quantization.config.template",
    "ModelExporter": "export.api",
    "ModelImporter": "export.api",
    "ModelQuantizer": "quantization.api",
    "QuantFlow": "quantization.config.type",
    "RuntimeOptions": "quantization.nn.runtime",
    "collect_statistics": "statistics.collection",
    "disable_native_inference": "quantization.nn.runtime",
    "enable_native_inference": "quantization.nn.runtime",
    "export_gguf": "export.api",
    "export_onnx": "export.api",
    "export_pipeline": "diffusion",
    "export_safetensors": "export.api",
    "import_model_from_safetensors": "export.api",
    "load_params": "export.params",
    "load_pipeline": "diffusion",
    "load_statistics": "statistics.files",
    "merge_statistics": "statistics.merging",
    "quantize_pipeline": "diffusion",
    "register_custom_operators": "numerics.custom_operators",
    "register_with_diffusers": "export.diffusers_loading",
    "save_params": "export.params",
    "save_statistics": "statistics.files",
    "set_runtime": "quantization.nn.runtime",
}
__all__ = sorted(_NAMES)


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
