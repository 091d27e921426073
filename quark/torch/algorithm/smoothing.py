"""Factors that move outliers from inputs into weights, and inputs as they are rounded."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.pipeline.context import Context
from quark.torch.pipeline.input_hooks import accumulate_inputs
from quark.torch.pipeline.model_pass import run_data
from quark.torch.pipeline.reducer import Reducer
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

MIN_WEIGHT = 1e-5  # magnitudes of weights are not taken below


def smoothing_factors(
    inputs: torch.Tensor, weights: torch.Tensor, alpha: float, min_factor: float
) -> torch.Tensor:
    """Return max|x|^alpha / max|w|^(1 - alpha), equation 4 of SmoothQuant (Xiao et al. 2023).

    Args:
        inputs: Largest magnitude of each channel of the input, (channels,).
        weights: Largest magnitude of the weights that read each channel, (channels,).
        alpha: Migration strength, from 0 (into inputs) to 1 (into weights).
        min_factor: Smallest factor. Channels that are always zero get 1.
    """
    factors = inputs**alpha / weights.clamp(min=MIN_WEIGHT) ** (1 - alpha)
    return torch.where(inputs > 0, factors.clamp(min=min_factor), 1.0)


def centred(factors: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Return factors divided by one number, so that the largest and smallest are around 1.

    Args:
        factors: (channels,), positive.
        used: Whether each channel is ever not zero, (channels,) bool. Others get 1.
    """
    if bool(used.any()):
        factors = factors / (factors[used].max() * factors[used].min()).sqrt()
    return torch.where(used, factors.clamp(1e-4, 1e4), 1.0)


def observe_ranges(context: Context, names: Iterable[str]) -> dict[str, ChannelRange]:
    """Return the range of each channel of the inputs of layers, by one pass over the data.

    Args:
        context: The model.
        names: Names of layers, one for each tensor to observe.
    """
    ranges = {name: ChannelRange() for name in names}
    observers = [(context.layers[name], observer) for name, observer in ranges.items()]
    run_data(
        context.model,
        context.batches,
        "smoothing",
        observe=partial(accumulate_inputs, observers),
        observed=ranges,
    )
    return Reducer(ranges, lambda leaf: ChannelRange()).combine(ranges)


def fake_quantized_inputs(
    layer: FakeQuantizedLayer, x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> torch.Tensor:
    """Return inputs as the quantizer of a layer would round them.

    Args:
        layer: The layer.
        x: A sample of its inputs, (tokens, channels).
        lo: Smallest value of each channel over all inputs, (channels,).
        hi: Largest value of each channel over all inputs, (channels,).
    """
    quantizer = layer.input_quantizer
    if quantizer is None:
        return x
    if not quantizer.is_dynamic:
        # Two more tokens, lo and hi, give the static range of all data instead of the sample's.
        x = torch.cat([x, lo.unsqueeze(0), hi.unsqueeze(0)])
        return quantizer.fake_quantize_copy(x)[:-2]
    return quantizer.fake_quantize_copy(x)
