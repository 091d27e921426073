"""What an algorithm is given to work on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from quark.torch.graph.structure import Structure
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import QuantMixin

if TYPE_CHECKING:
    from quark.torch.pipeline.accumulators import Gram


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
        rotated: Names of the layers whose inputs algorithms before this one will have rotated.
        grams: Returns statistics of the inputs of layers of the float model, of which nothing has
            been changed; None where the data has to tell.
    """

    model: nn.Module
    layers: dict[str, QuantMixin]
    structure: Structure
    batches: Iterable[Any]
    config: Config
    settle: Callable[[Mapping[str, QuantMixin]], None]
    rotated: frozenset[str] = frozenset()
    grams: Callable[[Mapping[str, QuantMixin]], dict[str, Gram]] | None = None


class Algorithm(NamedTuple):
    """What a line in the table of algorithms leads to.

    Attributes:
        check: Given the options and the configuration of every layer to be quantized, raises
            ``ValueError`` if the algorithm cannot serve them. Nothing has been done by then.
        apply: Given the context and the options, changes the model.
        needs_data: Given the options, tells whether calibration data is needed.
        resolve: Given the context and the options, raises ``ValueError`` if the model lacks what
            the options name or ask for, and returns the names of the layers whose inputs ``apply``
            would rotate as they pass. The model is unchanged, no algorithm has been applied.
    """

    check: Callable[[Any, Mapping[str, QuantizationConfig]], None]
    apply: Callable[[Context, Any], None]
    needs_data: Callable[[Any], bool] = lambda options: True
    resolve: Callable[[Context, Any], Collection[str]] = lambda context, options: ()
