"""What a checkpoint format is, and the table of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.name_lookup import one_of

# Name given as ``custom_mode`` -> "module:class", loaded on use.
FORMATS: dict[str, str] = {
    "quark": "quark.torch.export.formats.quark:QuarkFormat",
    "awq": "quark.torch.export.formats.awq:AwqFormat",
    "gptq": "quark.torch.export.formats.gptq:GptqFormat",
    "compressed-tensors": "quark.torch.export.formats.compressed_tensors:CompressedTensorsFormat",
    "fp8": "quark.torch.export.formats.fp8:Fp8Format",
}


class ExportFormat(ABC):
    """How quantized layers and their configuration are stored.

    Import is the same object run backwards: what ``tensors`` writes, a layer made by ``receive``
    takes.

    Args:
        config: Configuration of the model.
        options: Options of the export.
    """

    name: str

    def __init__(self, config: Config, options: JsonExporterConfig) -> None:
        self.config = config
        self.options = options

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return the configuration that a ``quantization_config`` stands for.

        Raises:
            ValueError: It says something that is not understood.
        """
        return Config.from_dict(section)

    @classmethod
    def of_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format that a ``quantization_config`` stands for.

        Raises:
            ValueError: It says something that is not understood.
        """
        config = cls.read(section)
        return cls(config, config.export or JsonExporterConfig())

    def found(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Look at what is stored before a model takes it.

        Args:
            layers: Layers that the configuration calls quantized.
            reader: Tensors by the names of the checkpoint.

        Returns:
            The layers that are stored quantized.

        Raises:
            ValueError: Something is stored that a model cannot take.
        """
        return layers

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:  # noqa: B027
        """Look at all that will be written before anything is; a format that holds all need not.

        Args:
            layers: The quantized layers, by their names in the model and in the checkpoint.
            left: Names of the layers that stay in float, likewise.

        Raises:
            ValueError: The format cannot hold them.
        """

    @abstractmethod
    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is stored for a quantized layer, by the part of the name behind the layer's.

        Args:
            layer: A quantized layer. It is not changed.
            scales: Scales to use instead of the layer's own, by tensor of the configuration.
        """

    @abstractmethod
    def receive(self, module: nn.Module, layer: QuantizationConfig) -> nn.Module:
        """Turn a float layer in place into one ready to take the stored tensors."""

    @abstractmethod
    def state_name(self, key: str) -> str:
        """Return the name in the state of a tensor stored as ``key``, empty if nothing needs it."""

    def taken(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the state of the model takes for a tensor stored as ``key``."""
        return tensor

    def stored_name(self, key: str) -> str:
        """Return the name in the checkpoint of what ``tensors`` calls ``key``, layer included."""
        return key

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """Return ``quantization_config`` for ``config.json``."""


def get_format(name: str, config: Config, options: JsonExporterConfig) -> ExportFormat:
    """Return the checkpoint format called ``name``.

    Raises:
        ValueError: No format has that name.
    """
    return format_class(name)(config, options)


def format_class(name: str) -> type[ExportFormat]:
    """Return the class of the checkpoint format called ``name``.

    Raises:
        ValueError: No format has that name.
    """
    module, _, attribute = FORMATS[one_of(name, FORMATS, "custom_mode")].partition(":")
    found: type[ExportFormat] = getattr(import_module(module), attribute)
    return found
