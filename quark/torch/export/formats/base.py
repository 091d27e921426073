"""What a checkpoint format is, and the table of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.names import one_of

# Name given as ``custom_mode`` -> "module:class", loaded on use.
FORMATS: dict[str, str] = {"quark": "quark.torch.export.formats.quark:QuarkFormat"}


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
        """Return the name in the state of the model of a tensor stored as ``key``."""

    @abstractmethod
    def section(self) -> dict[str, Any]:
        """Return ``quantization_config`` for ``config.json``."""


def get_format(name: str, config: Config, options: JsonExporterConfig) -> ExportFormat:
    """Return the checkpoint format called ``name``.

    Raises:
        ValueError: No format has that name.
    """
    module, _, attribute = FORMATS[one_of(name, FORMATS, "custom_mode")].partition(":")
    made: ExportFormat = getattr(import_module(module), attribute)(config, options)
    return made
