"""Enumerations of the configuration, at their documented import path."""

from __future__ import annotations

from enum import Enum

from quark.torch.numerics.enumerations import RoundType, ZeroPointType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import ScaleType
from quark.torch.quantization.observer.threshold_method import TQTThresholdInitMeth

__all__ = [
    "DeviceType",
    "Dtype",
    "QSchemeType",
    "QuantFlow",
    "QuantizationMode",
    "RoundType",
    "ScaleType",
    "TQTThresholdInitMeth",
    "ZeroPointType",
]


class DeviceType(Enum):
    """Target device of a layer."""

    CPU = "cpu"
    IPU = "ipu"


class QuantizationMode(Enum):
    """What is quantized: a model (``eager_mode``), or its graph (``fx_graph_mode``)."""

    eager_mode = 1
    fx_graph_mode = 2


class QuantFlow(Enum):
    """Storage of the model during quantization. Only ``standard`` (in memory) is supported."""

    standard = 1
    file2file = 2
    per_block = 3
