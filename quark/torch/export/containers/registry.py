"""The table of containers. It imports nothing heavy, so that listing the names costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quark.torch.export.formats.registry import FORMATS

# Name given as ``--model_export`` -> "module:class", imported on use. A directory that several
# containers hold is read as the first of them.
CONTAINERS: dict[str, str] = {
    "hf_format": "quark.torch.export.containers.safetensors:Safetensors",
    "quark_format": "quark.torch.export.containers.native:Native",
    "gguf": "quark.torch.export.containers.gguf:Gguf",
    "onnx": "quark.torch.export.containers.onnx:Onnx",
}
SAFETENSORS = "hf_format"


def load_container(name: str) -> Any:
    """Return the class of a container of ``CONTAINERS``."""
    module, _, attribute = CONTAINERS[name].partition(":")
    return getattr(import_module(module), attribute)


def conversion_targets() -> list[str]:
    """Return the names that ``convert`` takes: formats of safetensors, then other containers."""
    return [*FORMATS, *(name for name in CONTAINERS if name != SAFETENSORS)]
