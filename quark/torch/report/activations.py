"""What data does in a quantized model: inputs of layers, and predictions beside the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.perplexity import perplexity
from quark.torch.numerics.hadamard import rotate
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.quantization.nn.layer import is_transposed
from quark.torch.quantization.nn.packed import PackedMixin
from quark.torch.report.weights import Histogram, Values, histogram, values_of

SAMPLE = 512  # tokens of the inputs of a layer that are kept
POSITIONS = 64  # of a window, whose predictions are compared
CHANNELS = 5  # of the inputs of a layer, that are named


@dataclass(frozen=True)
class Channel:
    """A channel of the inputs of a layer with a large range.

    Attributes:
        index: Number of the channel.
        largest: Largest magnitude in it.
        ratio: That in units of the median over all channels; None if the median is 0.
    """

    index: int
    largest: float
    ratio: float | None


@dataclass(frozen=True)
class Inputs:
    """What a layer reads, as it is when it is quantized.

    Attributes:
        tokens: How many tokens reached the layer.
        values: How large the values are.
        channels: The channels with the largest range.
        histogram: Values before and after quantization.
        error: Norm of the error of quantizing them in units of their norm; None if they are not.
        clipped: Share of values beyond the largest quantized one; None if they are not.
    """

    tokens: int
    values: Values
    channels: list[Channel]
    histogram: Histogram
    error: float | None = None
    clipped: float | None = None


@dataclass(frozen=True)
class Predictions:
    """What a model predicts beside the original.

    Attributes:
        perplexity: Of the quantized model.
        original: Of the original, None where there is none.
        kl: Mean over positions of KL(original ‖ quantized), nats.
        agreement: Share of positions where both find the same token likeliest.
        positions: Number of positions that were compared.
    """

    perplexity: float
    original: float | None = None
    kl: float | None = None
    agreement: float | None = None
    positions: int = 0


@dataclass
class Seen:
    """What was seen of the inputs of a layer: tokens, ranges of channels, places of a sample."""

    tokens: int = 0
    largest: torch.Tensor | None = None
    places: list[int] = field(default_factory=list)


def is_linear(layer: PackedMixin) -> bool:
    """Whether a layer multiplies the last axis of its input by a matrix."""
    return issubclass(layer.float_class, nn.Linear) or is_transposed(layer.float_class)


class Reference:
    """What the original predicts, kept to be compared with.

    Args:
        store: Where logarithms of probabilities are kept.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.perplexity: float | None = None
        self._store = store
        self._count, self._divergence, self._same = 0, 0.0, 0

    def run(self, model: nn.Module, windows: torch.Tensor, batch_size: int) -> None:
        """Send windows of tokens through the original."""
        with _predicting(model, self._keep):
            self.perplexity = perplexity(model, windows, batch_size, "original")

    def compare(self, model: nn.Module, windows: torch.Tensor, batch_size: int) -> Predictions:
        """Send the same windows through the quantized model."""
        batches = iter(range(len(self._store)))
        with _predicting(model, partial(self._compare, batches)):
            found = perplexity(model, windows, batch_size, "quantized")
        if self.perplexity is None:
            return Predictions(found)
        mean, same = self._divergence / self._count, self._same / self._count
        return Predictions(found, self.perplexity, mean, same, self._count)

    def _keep(self, found: torch.Tensor) -> None:
        self._store[len(self._store)] = found

    def _compare(self, batches: Iterator[int], found: torch.Tensor) -> None:
        index = next(batches, None)
        if index is None:
            return
        expected = self._store[index].to(found.device)
        total = (expected.exp() * (expected - found)).sum(-1).double().sum()
        self._divergence += float(total)
        self._same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self._count += len(found)


@contextmanager
def _predicting(model: nn.Module, take: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Hand on what a model predicts at some positions, (positions, vocabulary) float32."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        logits = output.logits
        some = logits[:, :: max(1, logits.shape[1] // POSITIONS)].flatten(0, 1)
        take(some.float().log_softmax(-1))

    handle = model.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def watching(
    layers: Mapping[str, PackedMixin], store: ActivationStore, calls: int
) -> Iterator[dict[str, Seen]]:
    """Look at the inputs of linear layers while data runs through the model.

    Args:
        layers: Layers by name.
        store: Where a sample of their inputs is kept.
        calls: How often the model will be called.
    """
    seen = {name: Seen() for name, layer in layers.items() if is_linear(layer)}
    share = -(-SAMPLE // calls)

    def look(found: Seen, layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2)
        largest = _turned(layer, x).abs().amax(0).float()
        found.tokens += len(x)
        found.largest = largest if found.largest is None else found.largest.maximum(largest)
        found.places.append(len(store))
        store[len(store)] = x[:: max(1, len(x) // share)][:share]

    handles = [layers[n].register_forward_pre_hook(partial(look, s)) for n, s in seen.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def sample_of(seen: Seen, store: ActivationStore) -> torch.Tensor:
    """Return the sample of the inputs of a layer, (tokens, inputs) float32."""
    return torch.cat([store[place] for place in seen.places]).float()


def inputs_of(layer: PackedMixin, seen: Seen, sample: torch.Tensor) -> Inputs:
    """Return what a layer reads.

    Args:
        layer: A linear layer.
        seen: What was seen of its inputs.
        sample: Some of them, (tokens, inputs) float32, as they reach the layer.
    """
    x = _turned(layer, sample)
    after = layer.quantized_input(sample.unsqueeze(0)).squeeze(0)
    assert seen.largest is not None
    found = Inputs(seen.tokens, values_of(x), _widest(seen.largest), histogram(x, after))
    if layer.input_quantizer is None:
        return found
    norm = float(x.norm())
    error = float((after - x).norm()) / norm if norm else 0.0
    clipped = float((x.abs() > after.abs().max()).float().mean())
    return Inputs(found.tokens, found.values, found.channels, found.histogram, error, clipped)


def output_error(layer: PackedMixin, reference: torch.Tensor, sample: torch.Tensor) -> float | None:
    """Return the norm of the error of the outputs of a layer in units of their norm.

    It is the error that the layer itself adds to the same inputs, by rounding its weight, its
    inputs and its outputs.

    Args:
        layer: A linear layer.
        reference: What its weight was rounded from, float32, for inputs as they are quantized.
        sample: Inputs, (tokens, inputs) float32.

    Returns:
        The error; None if all outputs are zero.
    """
    bias = layer.value("bias", torch.float32)
    expected = layer.product(_turned(layer, sample), reference, bias)
    norm = float(expected.norm())
    return float((layer(sample.unsqueeze(0)) - expected).norm()) / norm if norm else None


def _turned(layer: PackedMixin, x: torch.Tensor) -> torch.Tensor:
    """Return inputs as they are when they are quantized."""
    return x if layer.input_rotation is None else rotate(x, layer.input_rotation)


def _widest(largest: torch.Tensor) -> list[Channel]:
    median = float(largest.median())
    most, index = largest.topk(min(CHANNELS, len(largest)))
    pairs = zip(index.tolist(), most.tolist(), strict=True)
    return [Channel(i, value, value / median if median else None) for i, value in pairs]
