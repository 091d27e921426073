"""Measurements on data: inputs of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.quantization.nn.packed import PackedLayer
from quark.torch.report.weights import Histogram, Values, histogram, values_of

SAMPLE = 512  # tokens whose inputs to a layer are stored
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
