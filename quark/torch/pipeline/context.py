"""The interface of algorithms: the context they work on, and the functions they provide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from quark.torch.graph.structure import Structure
from quark.torch.pipeline.shapes import BlockShape, DataShape, Work
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

if TYPE_CHECKING:
    from quark.torch.pipeline.accumulators import Gram
    from quark.torch.pipeline.journal import Journal


@dataclass(frozen=True)
class Context:
    """A model prepared for quantization, whose quantizers are switched off.

    Attributes:
        model: The model. Its weights are in float, and algorithms change them in place.
        layers: Its quantized layers by name.
        structure: Its structure as discovered.
        batches: Calibration data, which can be iterated any number of times.
        config: Configuration of the quantization.
        compute_scales: Computes the scales of the current weights of the given layers, including
            shared scales.
        rotated: Names of the layers whose inputs earlier algorithms rotate.
        grams: Returns stored statistics of the inputs of layers in the float model; None if
            statistics must be collected from the data.
        journal: Where finished blocks go to, for ``run_blocks``; None for nowhere.
    """

    model: nn.Module
    layers: dict[str, FakeQuantizedLayer]
    structure: Structure
    batches: Iterable[Any]
    config: Config
    compute_scales: Callable[[Mapping[str, FakeQuantizedLayer]], None]
    rotated: frozenset[str] = frozenset()
    grams: Callable[[Mapping[str, FakeQuantizedLayer]], dict[str, Gram]] | None = None
    journal: Journal | None = None


class Algorithm(NamedTuple):
    """The functions of an algorithm, to which its line in the table of algorithms refers.

    Attributes:
        check: Takes the options and the configurations of all layers to be quantized. Raises
            ``ValueError`` if the algorithm cannot be applied to them. It runs before any work.
        apply: Takes the context and the options, and changes the model.
        needs_data: Takes the options and returns whether calibration data is needed.
        resolve: Takes the context and the options. Raises ``ValueError`` if the options do not fit
            the model, and returns the names of the layers whose inputs ``apply`` will rotate
            online. It runs for all algorithms before the first one is applied, and changes nothing.
        proves: Takes the options and returns what ``discover`` has to prove for it.
        work: Takes the options, the shape of a block and that of the data, and returns what
            ``apply`` takes for the block.
    """

    check: Callable[[Any, Mapping[str, QuantizationConfig]], None]
    apply: Callable[[Context, Any], None]
    needs_data: Callable[[Any], bool] = lambda options: True
    resolve: Callable[[Context, Any], Collection[str]] = lambda context, options: ()
    proves: Callable[[Any], Collection[str]] = lambda options: ()
    work: Callable[[Any, BlockShape, DataShape], Work] = lambda options, block, data: Work()
