"""SmoothQuant (Xiao et al. 2023, section 4): outliers move from activations into weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from quark.torch.algorithm.rescaling import (
    as_rows,
    check_served,
    consumer_edits,
    readers,
    to_factors,
    usable_groups,
)
from quark.torch.graph.eval_mode import at_inference
from quark.torch.graph.structure import ScaleGroup
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.accumulators import ChannelRange, observing
from quark.torch.pipeline.batches import padding_mask, parts, progress, run_batch
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.quantization.config.algo import SmoothQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import counting

logger = logging.getLogger(__name__)

WEIGHT_FLOOR = 1e-5
STRONG = 0.8  # alpha above which weights per tensor suffer


def smoothing_factors(
    inputs: torch.Tensor, weights: torch.Tensor, alpha: float, floor: float
) -> torch.Tensor:
    """Return max|x|^alpha / max|w|^(1 - alpha), equation 4 of the paper.

    Args:
        inputs: Largest magnitude of each channel of the input, (channels,).
        weights: Largest magnitude of the weights that read each channel, (channels,).
        alpha: How much of the difficulty goes to the weights, 0 to 1.
        floor: Smallest factor. Channels that are always zero get 1.
    """
    factors = inputs**alpha / weights.clamp(min=WEIGHT_FLOOR) ** (1 - alpha)
    return torch.where(inputs > 0, factors.clamp(min=floor), 1.0)


def check(options: SmoothQuantConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No input is quantized, or ``alpha`` is not between 0 and 1.
    """
    if not 0 <= options.alpha <= 1:
        raise ValueError(f"smooth: alpha must be between 0 and 1, got {options.alpha}.")
    check_served(layers, "smooth", has_quantized_input)
    whole = [c for c in layers.values() if c.weight and c.weight.qscheme is QSchemeType.per_tensor]
    if options.alpha > STRONG and whole:
        logger.warning(
            "smooth: alpha=%g makes the rows of weights very different, where one scale serves a "
            "whole weight. Expect better of 0.5 to %g, autosmoothquant, or weights per channel.",
            options.alpha,
            STRONG,
        )


def resolve(context: Context, options: SmoothQuantConfig) -> Collection[str]:
    """Raise if nothing can be rescaled.

    Raises:
        ValueError: As of ``apply``.
    """
    _groups(context, options)
    return ()


def apply(context: Context, options: SmoothQuantConfig) -> None:
    """Smooth the inputs of all layers whose inputs are quantized, in one pass over the data.

    Raises:
        ValueError: No quantized input can be rescaled, or what ``scaling_layers`` names cannot.
    """
    groups = _groups(context, options)
    ranges = {name: ChannelRange() for group in groups for name in readers(group, context)}
    observers = [(context.layers[name], found) for name, found in ranges.items()]
    present: list[torch.Tensor | None] = [None]
    with (
        at_inference(context.model),
        observing(observers, lambda: present[0]),
        torch.no_grad(),
    ):
        for index, batch in enumerate(progress(parts(context.batches), "smoothing")):
            present[0] = padding_mask(batch)
            with counting(context.model, index):
                run_batch(context.model, batch)
    for group in groups:
        inputs = [
            to_factors(ranges[name].amax, edit, group.size, "amax")
            for name, _, edit in consumer_edits(group, context)
            if name in ranges and ranges[name].lo is not None
        ]
        if inputs:  # no token reaches some experts
            largest, weights = torch.stack(inputs).amax(0), largest_weights(group, context)
            factors = smoothing_factors(largest, weights, options.alpha, options.scale_clamp_min)
            group.apply_(context.model, factors)


def has_quantized_input(config: QuantizationConfig) -> bool:
    """Whether a layer rounds its inputs to a format with scales."""
    spec = config.input_tensors
    return spec is not None and spec.fmt.scaled


def largest_weights(group: ScaleGroup, context: Context) -> torch.Tensor:
    """Return the largest magnitude of the weights that each factor multiplies, (size,)."""
    found = []
    for edit in group.edits:
        if edit.power > 0:
            weight = context.model.get_parameter(edit.parameter).detach()
            largest = as_rows(weight, edit.axis).float().abs().amax(0)
            found.append(to_factors(largest, edit, group.size, "amax"))
    return torch.stack([f.to(found[0].device) for f in found]).amax(0)


def _groups(context: Context, options: SmoothQuantConfig) -> list[ScaleGroup]:
    return usable_groups(
        context, "smooth", has_quantized_input, options.scaling_layers, options.model_decoder_layers
    )


ALGORITHM = Algorithm(check, apply, resolve=resolve)
