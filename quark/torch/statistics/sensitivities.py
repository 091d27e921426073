"""Sensitivities: what the predictions of a model lose if the weights of one unit are rounded.

A unit is a layer, or all experts of a layer. A call that measures a unit begins at the block of the
unit: earlier blocks return what they returned in the unchanged model, and do not compute. The
divergence of predictions is measured at two bits, on few tokens. On more tokens, and at four bits,
it follows from the outputs of the block, whose run costs much less: it is nearly proportional to
their relative error, the mean over tokens of ``|y' - y|² / |y|²``, since norms read hidden states
relative to their size::

                 relative error of the block      divergence
    two bits     0.020 on the first piece         0.030, measured there
    two bits     0.024 on both pieces             0.030 · 0.024 / 0.020 = 0.036
    four bits    0.0012 on both pieces            0.030 · 0.0012 / 0.020 = 0.0018

At four bits a unit may lose more or less for the error of its own outputs than at two: rounded
queries and keys, for instance, change which tokens attention chooses, and this does not grow for
ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.layers import output_error, to_matrix
from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.evaluation.output_head import OutputHead
from quark.torch.graph.block_selection import is_inside
from quark.torch.graph.residency import resident
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.activation_store import ActivationStore, current_limit
from quark.torch.pipeline.batches import (
    padding_mask,
    run_batch,
    show_progress,
    split_sequences,
    take_excerpt,
)
from quark.torch.pipeline.capture import StopForward
from quark.torch.pipeline.chunks import Chunks, count_tokens
from quark.torch.pipeline.statistics import Probe
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.fake_quantized import QUANTIZERS, FakeQuantizedLayer
from quark.torch.quantization.nn.padding import padding, without_padding
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.statistics.block_outputs import BlockOutputs
from quark.torch.statistics.log_probabilities import predict_parts

logger = logging.getLogger(__name__)

PROBES = 1  # default number of pieces of the data whose predictions are measured
PIECE = 128  # tokens of a piece
LENGTH = 64  # tokens of a sequence in a piece
SEEN = 4  # for each piece that is predicted, pieces that run through single blocks
COARSE, FINE = 2, 4  # bits
GROUP = 64  # group size of the rounding
LONG = 10.0  # seconds from which on the time is told


class Probes(NamedTuple):
    """The effect of rounding each unit alone to two bits, and to four, by layer."""

    coarse: dict[str, Probe]
    fine: dict[str, Probe]


@torch.no_grad()
def measure_probes(
    model: nn.Module,
    blocks: Sequence[str],
    units: Sequence[Sequence[str]],
    pieces: Sequence[Any],
    predicted: int,
    grams: Mapping[str, Gram],
) -> Probes:
    """Return the effect of rounding each unit alone.

    Args:
        model: The model, whose layers have quantizers of weights that are switched off.
        blocks: Its blocks in the order of execution.
        units: Layers that are rounded together, all of one block, in the order of blocks.
        pieces: The result of ``first_pieces``. Without any, nothing is measured.
        predicted: Number of pieces, the first ones, whose predictions are measured.
        grams: Sums over the inputs of each layer, by name.
    """
    probes = Probes({}, {})
    if not pieces:
        return probes
    with _Runs(model, blocks, pieces, predicted) as runs:
        start = time.monotonic()
        for number, unit in enumerate(show_progress(units, "sensitivities")):
            layers = {name: _get_layer(model, name) for name in unit}
            block = block_of(unit[0], blocks)
            with _rounding(model, layers, grams, COARSE) as error:
                divergence = runs.divergence(block)
                relative, coarse_relative = runs.block_errors(block)
            with _rounding(model, layers, grams, FINE) as fine_error:
                _, fine_relative = runs.block_errors(block)
            if not relative:  # not known: then the divergence is proportional to the error
                relative, coarse_relative, fine_relative = error or 1.0, error or 1.0, fine_error
            coarse, fine = (divergence * r / relative for r in (coarse_relative, fine_relative))
            probes.coarse.update(dict.fromkeys(unit, Probe(coarse, runs.tokens, error)))
            probes.fine.update(dict.fromkeys(unit, Probe(fine, runs.tokens, fine_error)))
            if number == 0:
                _tell_time(time.monotonic() - start, units, blocks)
    return probes


def first_pieces(batches: Iterable[Any], count: int) -> list[Any]:
    """Return the first pieces of data, whatever its batches.

    A piece is the first 64 tokens of two sequences, or shorter sequences with 128 tokens together.
    Sequences that have more than tokens, such as images, are not cut.

    Args:
        batches: Batches that can be iterated any number of times.
        count: The largest number of pieces.
    """

    def cut(sequence: Any) -> Any:
        _, length = count_tokens(sequence)
        return take_excerpt(sequence, LENGTH) if length > LENGTH else sequence

    sequences = map(cut, split_sequences(batches))
    return list(islice(Chunks(sequences, tokens=PIECE), count))


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


class _Runs:
    """Runs of a model for some calls, beside what it returned for them unchanged.

    Args:
        model: The model.
        blocks: Its blocks in the order of execution.
        calls: Data of the calls.
        predicted: Number of calls, the first ones, whose predictions are compared.

    Attributes:
        tokens: Number of tokens that are predicted.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], calls: Sequence[Any], predicted: int
    ) -> None:
        self._model, self._calls, self._predicted = model, calls, predicted
        self._outputs = BlockOutputs(model, blocks)
        self._expected = ActivationStore(current_limit() // 2)
        self._parts: list[range] = []  # of each call: places of its log-probabilities
        self._head: OutputHead | None = None
        self.tokens = 0

    def __enter__(self) -> _Runs:
        is_sequence = self._outputs.prove(self._calls[0])
        self._head = OutputHead(self._model) if is_sequence else None
        for call in self._calls[: self._predicted]:
            first = len(self._expected)
            with self._outputs.recording():
                predict_parts(self._model, call, self._head, self._keep)
            self._parts.append(range(first, len(self._expected)))
        for call in self._calls[self._predicted :]:
            with self._outputs.recording():
                run_batch(self._model, call)
        return self

    def _keep(self, log_probs: torch.Tensor) -> None:
        self._expected[len(self._expected)] = log_probs
        self.tokens += len(log_probs)

    def __exit__(self, *error: object) -> None:
        self._outputs.clear()
        self._expected.clear()

    def divergence(self, block: str) -> float:
        """Return the sum over tokens of KL(unchanged ‖ model) in nats; runs begin at a block."""
        divergences: list[torch.Tensor] = []

        def compare(places: Iterator[int], log_probs: torch.Tensor) -> None:
            divergences.append(kl_divergence(self._expected[next(places)], log_probs))

        for index, parts in enumerate(self._parts):
            with self._outputs.beginning_at(block, index):
                receive = partial(compare, iter(parts))
                predict_parts(self._model, self._calls[index], self._head, receive)
        return float(torch.cat(divergences).sum())

    def block_errors(self, block: str) -> tuple[float, float]:
        """Return the relative squared error of what a block returns, the mean over tokens.

        It is that of the calls whose predictions are compared, and that of all calls; 0 and 0 if
        that is not known.
        """
        errors = []
        for index, call in enumerate(self._calls):
            before = _hidden_states(self._outputs.recorded(block, index))
            after = _hidden_states(self._run_to(block, index))
            if before is None or after is None or before.shape != after.shape:
                return 0.0, 0.0
            with padding(padding_mask(call)):
                y, other = (without_padding(x).double() for x in (before, after))
            size = y.square().sum(-1).clamp_min(torch.finfo(y.dtype).tiny)
            errors.append(((other - y).square().sum(-1) / size).flatten())
        first = torch.cat(errors[: self._predicted])
        return float(first.mean()), float(torch.cat(errors).mean())

    def _run_to(self, block: str, index: int) -> Any:
        """Run a call up to the end of a block; return what the block returns, None without one."""
        outputs: list[Any] = []

        def stop(module: nn.Module, args: Any, output: Any) -> None:
            outputs.append(output)
            raise StopForward

        if not block:
            return None
        hook = self._model.get_submodule(block).register_forward_hook(stop)
        try:
            with self._outputs.beginning_at(block, index), suppress(StopForward):
                run_batch(self._model, self._calls[index])
        finally:
            hook.remove()
        return outputs[0] if outputs else None


def _hidden_states(output: Any) -> torch.Tensor | None:
    """Return the first tensor of what a block returns, None without one."""
    x = output[0] if isinstance(output, tuple) and output else output
    return x if isinstance(x, torch.Tensor) and x.is_floating_point() else None
