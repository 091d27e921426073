"""Sensitivities: what the predictions of a model lose if the weights of one unit are rounded.

A unit is a layer, or all experts of a layer. A call that measures a unit begins at the block of the
unit: earlier blocks return what they returned in the unchanged model, and do not compute. The
divergence of predictions is measured at two bits, on few tokens. On more tokens, and at four bits,
it follows from the outputs of the block, whose run costs much less: it is nearly proportional to
their relative error, the mean over tokens of ``|y' - y|² / |y|²``, since norms read hidden states
relative to their size::

                 relative error of the block      divergence
    two bits     0.020 on 128 tokens              0.030, measured there
    two bits     0.024 on 512 other tokens        0.030 · 0.024 / 0.020 = 0.036
    four bits    0.0012 on these                  0.030 · 0.0012 / 0.020 = 0.0018

A few tokens have a large share of the divergence. So 0.030 and 0.020 are squares of mean square
roots over the tokens, whose ratio varies less. One factor for all units then makes the sum of
their divergences on the 128 tokens what was measured.

At four bits a unit may lose more or less for the error of its own outputs than at two: rounded
queries and keys, for instance, change which tokens attention chooses, and this does not grow for
ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.layers import output_error, to_matrix
from quark.torch.graph.block_selection import is_inside
from quark.torch.graph.residency import resident
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.batches import show_progress, split_sequences, take_excerpt
from quark.torch.pipeline.chunks import Chunks, count_tokens
from quark.torch.pipeline.statistics import Probe
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.fake_quantized import QUANTIZERS, FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.statistics.probe_runs import Pieces, ProbeRuns

logger = logging.getLogger(__name__)

PROBES = 1  # default
PREDICTED = 128  # tokens whose predictions are measured, for each probe, in a call
SEEN = 512  # tokens that run through single blocks, for each probe
SEEN_CALL = 256  # tokens of a call of these
COARSE, FINE = 2, 4  # bits
GROUP = 64  # group size of the rounding
LONG = 10.0  # seconds from which on the time is told


class Probes(NamedTuple):
    """The effect of rounding each unit alone to two bits, and to four, by layer."""

    coarse: dict[str, Probe]
    fine: dict[str, Probe]


class _Effect(NamedTuple):
    """The effect of rounding a unit; see ``Probe``.

    Attributes:
        divergence: KL divergence of the predicted tokens at two bits, the mean in nats.
        relative: Relative error of the block on these tokens, the mean; 0 if it is not known.
        ratio: Divergence per relative error, that of the squares of mean square roots.
        coarse: Relative error of the block on the other tokens at two bits, the mean.
        fine: The same at four bits.
        error: Squared error of the outputs of the unit at two bits, the sum over all tokens.
        fine_error: The same at four bits.
    """

    divergence: float
    relative: float
    ratio: float
    coarse: float
    fine: float
    error: float
    fine_error: float

    def losses(self, factor: float) -> tuple[float, float]:
        """Return the mean divergence at two and at four bits.

        Args:
            factor: Sum of the divergences of all units, over what their ratios give.
        """
        if self.relative and self.coarse:
            return factor * self.ratio * self.coarse, factor * self.ratio * self.fine
        share = self.fine_error / self.error if self.error else 0.0
        return self.divergence, self.divergence * share


@torch.no_grad()
def measure_probes(
    model: nn.Module,
    blocks: Sequence[str],
    units: Sequence[Sequence[str]],
    pieces: Pieces,
    grams: Mapping[str, Gram],
) -> Probes:
    """Return the effect of rounding each unit alone.

    Args:
        model: The model, whose layers have quantizers of weights that are switched off.
        blocks: Its blocks in the order of execution.
        units: Layers that are rounded together, all of one block, in the order of blocks.
        pieces: The result of ``first_pieces``. Without any, nothing is measured.
        grams: Sums over the inputs of each layer, by name.
    """
    probes, effects = Probes({}, {}), list[_Effect]()
    if not pieces.predicted:
        return probes
    with ProbeRuns(model, blocks, pieces) as runs:
        start = time.monotonic()
        for number, unit in enumerate(show_progress(units, "sensitivities")):
            layers = {name: _get_layer(model, name) for name in unit}
            effects.append(_measure_effect(model, layers, block_of(unit[0], blocks), runs, grams))
            if number == 0:
                _tell_time(time.monotonic() - start, units, blocks)
    expected = sum(effect.ratio * effect.relative for effect in effects)
    factor = sum(e.divergence for e in effects if e.relative) / expected if expected else 0.0
    for unit, effect in zip(units, effects, strict=True):
        coarse, fine = (runs.tokens * loss for loss in effect.losses(factor))
        probes.coarse.update(dict.fromkeys(unit, Probe(coarse, runs.tokens, effect.error)))
        probes.fine.update(dict.fromkeys(unit, Probe(fine, runs.tokens, effect.fine_error)))
    return probes


def _measure_effect(
    model: nn.Module,
    layers: Mapping[str, FakeQuantizedLayer],
    block: str,
    runs: ProbeRuns,
    grams: Mapping[str, Gram],
) -> _Effect:
    """Return the effect of rounding the layers of a unit, all of one block."""
    with _rounding(model, layers, grams, COARSE) as error:
        measured, relatives = runs.divergences(block)
        coarse = float(runs.block_errors(block).mean())
    with _rounding(model, layers, grams, FINE) as fine_error:
        fine = float(runs.block_errors(block).mean())
    divergences = measured.clamp_min(0)  # values below 0 are rounding errors
    relative = float(relatives.mean())
    ratio = _root_mean(divergences) / _root_mean(relatives) if relative else 0.0
    return _Effect(float(divergences.mean()), relative, ratio, coarse, fine, error, fine_error)


def _root_mean(values: torch.Tensor) -> float:
    """Return the square of the mean of square roots."""
    return float(values.sqrt().mean().square())


def first_pieces(batches: Iterable[Any], probes: int) -> Pieces:
    """Return the first tokens of data in calls, whatever its batches.

    Sequences that have more than tokens, such as images, are not cut.

    Args:
        batches: Batches that can be iterated any number of times.
        probes: Number of times that 128 tokens are predicted, and 512 run through single blocks.
    """
    return Pieces(
        _cut_pieces(batches, probes, PREDICTED),
        _cut_pieces(batches, SEEN // SEEN_CALL * probes, SEEN_CALL),
    )


def _cut_pieces(batches: Iterable[Any], count: int, tokens: int) -> list[Any]:
    """Return calls: the first tokens of a sequence, or shorter sequences with as many together."""

    def cut(sequence: Any) -> Any:
        _, length = count_tokens(sequence)
        return take_excerpt(sequence, tokens) if length > tokens else sequence

    return list(islice(Chunks(map(cut, split_sequences(batches)), tokens=tokens), count))


def _tell_time(first: float, units: Sequence[Sequence[str]], blocks: Sequence[str]) -> None:
    """Tell the time that all units will take, given that of the first one."""
    # Example: 4 blocks of 7 layers. A layer of the first block runs all 4, one of the last block 1:
    # 28 layers take as long as 7 · (4 + 3 + 2 + 1) / 4 = 17.5 times the first one.
    begins = [len(blocks) - _place(block_of(unit[0], blocks), blocks) for unit in units]
    seconds = first * sum(begins) / begins[0]
    if seconds >= LONG:
        logger.info("The sensitivities of %d layers take about %.0f s.", len(units), seconds)


def block_of(layer: str, blocks: Sequence[str]) -> str:
    """Return the block that holds a layer, "" if none does."""
    return next((block for block in blocks if is_inside(layer, block)), "")


def _place(block: str, blocks: Sequence[str]) -> int:
    return list(blocks).index(block) if block else 0


def _get_layer(model: nn.Module, name: str) -> FakeQuantizedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, FakeQuantizedLayer)
    return layer


def coarse_spec(inputs: int) -> QuantizationSpec:
    """Return how a weight with some inputs is rounded to two bits."""
    return QuantizationSpec(
        f"int{COARSE}",  # type: ignore[arg-type]
        qscheme="per_group",  # type: ignore[arg-type]
        ch_axis=-1,
        group_size=GROUP if inputs % GROUP == 0 else inputs,
        symmetric=True,
        is_dynamic=False,
    )


@contextmanager
def _rounding(
    model: nn.Module,
    layers: Mapping[str, FakeQuantizedLayer],
    grams: Mapping[str, Gram],
    bits: int,
) -> Iterator[float]:
    """Round the weights of layers to a few bits inside the context.

    Yields the squared error of the outputs of these layers, summed over all tokens of the data.
    """
    before = {name: layer.weight_quantizer for name, layer in layers.items()}
    try:
        error = 0.0
        with resident(model, *layers):
            for name, layer in layers.items():
                layer.add_module(QUANTIZERS["weight"], _make_quantizer(layer, bits))
                error += weight_error(layer, round_to_nearest(layer), grams[name])
        yield error
    finally:
        for name, quantizer in before.items():
            layers[name].add_module(QUANTIZERS["weight"], quantizer)


def _make_quantizer(layer: FakeQuantizedLayer, bits: int) -> TensorQuantizer:
    """Return a quantizer that rounds the weight of a layer to a few bits, with its scales."""
    assert layer.weight_quantizer is not None
    spec = layer.weight_quantizer.spec.changed(dtype=Dtype[f"int{bits}"])
    quantizer = TensorQuantizer(spec).to(layer.weight.device).eval()
    quantizer.observer(layer.weight.detach())
    quantizer.compute_scales(layer.weight.detach())
    return quantizer


def round_to_nearest(layer: FakeQuantizedLayer) -> torch.Tensor:
    """Return the weight of a layer with final scales, rounded to the nearest values."""
    assert layer.weight_quantizer is not None
    return layer.weight_quantizer.freeze_(layer.weight.detach().clone())


def weight_error(layer: FakeQuantizedLayer, weight: torch.Tensor, gram: Gram) -> float:
    """Return the squared error of the outputs of a layer under another weight, over all tokens."""
    if gram.total is None:
        return 0.0
    change = weight.float() - layer.weight.detach().float()
    rows = to_matrix(change, layer.input_axis)
    return float(output_error(rows, gram.total.to(rows.device)))
