"""What an algorithm is given to work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from quark.torch.graph.structure import Structure
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.mixin import QuantMixin


@dataclass(frozen=True)
class Context:
    """A model prepared for quantization, whose quantizers are switched off.

    Attributes:
        model: The model. Its weights are in float; algorithms change them in place.
        layers: Its quantized layers by name.
        structure: What was found and proved of it.
        batches: Calibration data, which can be run through any number of times.
        config: How the model is quantized.
        settle: Settles the scales of the weights of some layers, shared ones too, as they are.
    """

    model: nn.Module
    layers: dict[str, QuantMixin]
    structure: Structure
    batches: Iterable[Any]
    config: Config
    settle: Callable[[Mapping[str, QuantMixin]], None]


class Algorithm(NamedTuple):
    """What a line in the table of algorithms leads to.

    Attributes:
        check: Given the options and the configuration of every layer to be quantized, raises
            ``ValueError`` if the algorithm cannot serve them. Nothing has been done by then.
        apply: Given the context and the options, changes the model.
        needs_data: Given the options, tells whether calibration data is needed.
    """

    check: Callable[[Any, Mapping[str, QuantizationConfig]], None]
    apply: Callable[[Context, Any], None]
    needs_data: Callable[[Any], bool] = lambda options: True
