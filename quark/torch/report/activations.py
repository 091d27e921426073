"""Measurements on data: inputs of layers, and predictions compared with the original model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.output_head import Receive
from quark.torch.evaluation.perplexity import perplexity
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.quantization.nn.router_choices import RouterChoices
from quark.torch.report.weights import Histogram, Values, histogram, values_of

SAMPLE = 512  # tokens whose inputs to a layer are stored
POSITIONS = 64  # positions of a window at which predictions are compared
CHANNELS = 5  # channels with the largest ranges that are listed for a layer


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
    """Inputs of a layer, multiplied and rotated where the layer does so before it quantizes.

    Attributes:
        tokens: Number of tokens that reached the layer.
        values: Magnitudes of the values.
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
    """Predictions of a quantized model compared with those of the original.

    Attributes:
        perplexity: Perplexity of the quantized model.
        original: Perplexity of the original, None without one.
        kl: Mean over positions of KL(original ‖ quantized), nats.
        agreement: Share of positions where the top-1 predictions agree.
        positions: Number of positions that were compared.
    """

    perplexity: float
    original: float | None = None
    kl: float | None = None
    agreement: float | None = None
    positions: int = 0


@dataclass
class InputRecord:
    """Record of the inputs of a layer.

    Attributes:
        tokens: Number of tokens.
        largest: Largest magnitude of each channel, (inputs,) float32; None without tokens.
        places: Indices of the samples in the store.
    """

    tokens: int = 0
    largest: torch.Tensor | None = None
    places: list[int] = field(default_factory=list)

    def sample(self, store: ActivationStore, x: torch.Tensor, share: int, calls: int) -> None:
        """Store some rows of inputs of the layer.

        Args:
            store: The store.
            x: The inputs of a call, (tokens, inputs).
            share: Number of rows to store.
            calls: Number of calls to store rows of. An output head is called more often.
        """
        if len(self.places) < calls:
            self.places.append(len(store))
            store[len(store)] = x[:: max(1, len(x) // share)][:share]


class Reference:
    """Predictions of the original model, stored to compare others with.

    Args:
        store: Store for log-probabilities.

    Attributes:
        perplexity: Perplexity of the original; None if it did not run.
        agreement: Result of ``RouterChoices.agreement`` with the model that was compared last.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.perplexity: float | None = None
        self.agreement: dict[str, float] = {}
        self._choices = RouterChoices()
        self._store = store
        self._count, self._divergence, self._same = 0, 0.0, 0

    def run(self, model: nn.Module, windows: torch.Tensor, batch_size: int) -> None:
        """Run the original on windows of tokens."""
        take = _at_some_positions(windows.shape[1], self._keep)
        with self._choices.record(model):
            self.perplexity = perplexity(model, windows, batch_size, "original", receive=take)

    def compare(
        self,
        model: nn.Module,
        windows: torch.Tensor,
        batch_size: int,
        observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Predictions:
        """Run the quantized model on the same windows and compare its predictions."""
        parts = iter(range(len(self._store)))
        take = _at_some_positions(windows.shape[1], partial(self._compare, parts))
        choices = RouterChoices()
        with choices.record(model):
            value = perplexity(
                model, windows, batch_size, "quantized", receive=take, observe=observe
            )
        self.agreement = self._choices.agreement(choices)
        if self.perplexity is None:
            return Predictions(value)
        mean, same = self._divergence / self._count, self._same / self._count
        return Predictions(value, self.perplexity, mean, same, self._count)

    def _keep(self, log_probs: torch.Tensor) -> None:
        self._store[len(self._store)] = log_probs

    def _compare(self, parts: Iterator[int], log_probs: torch.Tensor) -> None:
        index = next(parts, None)
        if index is None:
            return
        expected = self._store[index].to(log_probs.device)
        total = (expected.exp() * (expected - log_probs)).sum(-1).double().sum()
        self._divergence += float(total)
        self._same += int((expected.argmax(-1) == log_probs.argmax(-1)).sum())
        self._count += len(log_probs)


def _at_some_positions(length: int, take: Callable[[torch.Tensor], None]) -> Receive:
    """Pass log-probabilities at some positions of windows to a function.

    Args:
        length: Tokens of a window.
        take: Receives them part by part, (positions, vocabulary) float32.

    Returns:
        A function that receives the logits of parts; see ``OutputHead.run``.
    """
    step = max(1, length // POSITIONS)

    def receive(first: int, logits: torch.Tensor) -> None:
        some = logits[:, -first % step :: step].flatten(0, 1)
        if len(some):
            take(some.float().log_softmax(-1))

    return receive


@contextmanager
def recording_inputs(
    layers: Mapping[str, PackedLayer],
    records: Mapping[str, InputRecord],
    store: ActivationStore,
    calls: int,
) -> Iterator[None]:
    """Record the inputs of linear layers while data runs through the model.

    Args:
        layers: Layers by name.
        records: Records of the linear ones.
        store: Store for a sample of their inputs.
        calls: Number of times the model will be called.
    """
    share = -(-SAMPLE // calls)

    def record_input(record: InputRecord, layer: Any, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2)
        largest = layer.prepared_input(x).abs().amax(0).float()
        record.tokens += len(x)
        record.largest = largest if record.largest is None else record.largest.maximum(largest)
        record.sample(store, x, share, calls)

    handles = [
        layers[n].register_forward_pre_hook(partial(record_input, record))
        for n, record in records.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sample_of(record: InputRecord, store: ActivationStore) -> torch.Tensor:
    """Return the sample of the inputs of a layer, (tokens, inputs) float32."""
    return torch.cat([store[place] for place in record.places]).float()


def inputs_of(layer: PackedLayer, record: InputRecord, sample: torch.Tensor) -> Inputs:
    """Return figures of the inputs of a layer.

    Args:
        layer: A linear layer.
        record: Record of its inputs.
        sample: Some of them, (tokens, inputs) float32, as they reach the layer.
    """
    x = layer.prepared_input(sample)
    after = layer.quantized_input(sample.unsqueeze(0)).squeeze(0)
    assert record.largest is not None
    figures = Inputs(record.tokens, values_of(x), _widest(record.largest), histogram(x, after))
    if layer.input_quantizer is None:
        return figures
    norm = float(x.norm())
    error = float((after - x).norm()) / norm if norm else 0.0
    clipped = float((x.abs() > after.abs().max()).float().mean())
    return replace(figures, error=error, clipped=clipped)


def output_error(layer: PackedLayer, reference: torch.Tensor, sample: torch.Tensor) -> float | None:
    """Return the norm of the error of the outputs of a layer in units of their norm.

    It is the error that the layer itself adds to the same inputs, by rounding its weight, its
    inputs and its outputs.

    Args:
        layer: A linear layer.
        reference: Weight before it was rounded, float32, for prepared inputs.
        sample: Inputs, (tokens, inputs) float32.

    Returns:
        The error; None if all outputs are zero.
    """
    bias = layer.value("bias", torch.float32)
    expected = layer.product(layer.prepared_input(sample), reference, bias)
    norm = float(expected.norm())
    return float((layer(sample.unsqueeze(0)) - expected).norm()) / norm if norm else None


def _widest(largest: torch.Tensor) -> list[Channel]:
    median = float(largest.median())
    most, index = largest.topk(min(CHANNELS, len(largest)))
    pairs = zip(index.tolist(), most.tolist(), strict=True)
    return [Channel(i, value, value / median if median else None) for i, value in pairs]
