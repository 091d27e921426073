"""SmoothQuant with the strength searched for each rescaling, by the error of what it quantizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import torch

from quark.torch.algorithm.rescaling import (
    along,
    as_rows,
    check_served,
    consumer_edits,
    first_reader,
    producer_edit,
    to_channels,
    to_factors,
    usable_groups,
)
from quark.torch.algorithm.smoothquant import has_quantized_input
from quark.torch.graph.structure import Edit, ScaleGroup
from quark.torch.pipeline.accumulators import Sample, observing
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.runner import Block, run_blocks
from quark.torch.quantization.config.algo import AutoSmoothQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.layer import QuantMixin

STEPS = 10  # strengths of the search: 0.1, 0.2, … 1
TOKENS = 1024  # that the error is measured on
POWERS = {"MSE": 2.0, "MAE": 1.0}


def check(options: AutoSmoothQuantConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot serve these layers.

    Raises:
        ValueError: No input is quantized, or ``compute_scale_loss`` is unknown.
    """
    if _loss_name(options) not in POWERS:
        raise ValueError(
            f"autosmoothquant: compute_scale_loss={options.compute_scale_loss!r} is unknown: "
            "give MSE or MAE."
        )
    check_served(layers, "autosmoothquant", has_quantized_input)


def resolve(context: Context, options: AutoSmoothQuantConfig) -> Collection[str]:
    """Raise if nothing can be rescaled.

    Raises:
        ValueError: As of ``apply``.
    """
    _groups(context, options)
    return ()


def apply(context: Context, options: AutoSmoothQuantConfig) -> None:
    """Choose the strength of every rescaling by the outputs of the layers it feeds.

    The error is that of outputs with weights and inputs quantized as configured, on a sample of
    tokens; static ranges are those of all tokens. Leaving inputs as they are is a candidate too.

    Raises:
        ValueError: No quantized input can be rescaled, or what ``scaling_layers`` names cannot.
    """
    groups = _groups(context, options)
    by_block: dict[str, list[ScaleGroup]] = defaultdict(list)
    for group in groups:
        by_block[group.block].append(group)
    names = context.structure.blocks
    for block in run_blocks(context.model, names, context.batches, "autosmoothquant"):
        samples = _observe(context, block, by_block[block.name])
        for group in by_block[block.name]:
            _rescale(group, context, samples, POWERS[_loss_name(options)])


def strength(inputs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return factors max|x|^alpha, centred on 1; channels that are always zero get 1.

    Args:
        inputs: Largest magnitude of each channel, (channels,).
        alpha: 0 for no change, 1 for inputs of one range.
    """
    used = inputs > 0
    factors = torch.where(used, inputs, 1.0) ** alpha
    if bool(used.any()):
        factors = factors / (factors[used].max() * factors[used].min()).sqrt()
    return torch.where(used, factors.clamp(1e-4, 1e4), 1.0)


def _loss_name(options: AutoSmoothQuantConfig) -> str:
    return (options.compute_scale_loss or "MSE").upper()


def rounded_inputs(
    layer: QuantMixin, x: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
) -> torch.Tensor:
    """Return inputs as the layer would quantize them.

    Args:
        layer: The layer.
        x: Some of its inputs, (tokens, channels).
        lo: Smallest value of each channel over all inputs, (channels,).
        hi: Largest, likewise.
    """
    quantizer = layer.input_quantizer
    if quantizer is None:
        return x
    if not quantizer.is_dynamic:
        # As two tokens more, so that static ranges are those of all data.
        x = torch.cat([x, lo.unsqueeze(0), hi.unsqueeze(0)])
        return quantizer.rounded(x)[:-2]
    return quantizer.rounded(x)


def _observe(context: Context, block: Block, groups: list[ScaleGroup]) -> dict[str, Sample]:
    """Run the data once; layers that read the same tensor share the sample of it."""
    samples: dict[str, Sample] = {}
    observers = []
    names = [name for group in groups for name, _, _ in consumer_edits(group, context)]
    names += [group.producer for group in groups if producer_edit(group, context)]
    for name in dict.fromkeys(names):
        first = first_reader(name, names, context)
        if first not in samples:
            samples[first] = Sample(TOKENS)
            observers.append((context.layers[first], samples[first]))
        samples[name] = samples[first]
    with observing(observers, lambda: block.mask):
        block.run()
    return samples


def _rescale(group: ScaleGroup, context: Context, samples: dict[str, Sample], power: float) -> None:
    """Apply the factors under which the outputs of all consumers change least."""
    edits = [e for e in consumer_edits(group, context) if not samples[e[0]].is_empty]
    if not edits:
        return
    ranges = [to_factors(samples[n].range.amax, e, group.size, "amax") for n, _, e in edits]
    inputs = torch.stack(ranges).amax(0)
    best = torch.ones_like(inputs)
    lowest = _loss(best, group, context, samples, power)
    for step in range(1, STEPS + 1):
        factors = strength(inputs, step / STEPS)
        loss = _loss(factors, group, context, samples, power)
        if loss < lowest:
            best, lowest = factors, loss
    group.apply_(context.model, best)
    for sample, edit in {id(samples[n]): (samples[n], e) for n, _, e in edits}.values():
        sample.rescale_(to_channels(best, edit))


def _loss(
    factors: torch.Tensor,
    group: ScaleGroup,
    context: Context,
    samples: dict[str, Sample],
    power: float,
) -> float:
    """Return the change of the outputs of all consumers, and of what the producer gives them."""
    loss = 0.0
    edits = [edit for edit in consumer_edits(group, context) if not samples[edit[0]].is_empty]
    for name, layer, edit in edits:
        sample = samples[name]
        by = to_channels(factors, edit)
        weight, x = layer.weight.detach().float(), sample.tokens.float()
        lo, hi = sample.range.lo, sample.range.hi
        assert lo is not None and hi is not None
        found = rounded_weight(layer, weight * along(by, weight, edit.axis))
        inputs = rounded_inputs(layer, x / by, lo / by, hi / by)
        rows = as_rows(weight, edit.axis)
        change = inputs @ as_rows(found, edit.axis).T - x @ rows.T
        loss += float(change.abs().pow(power).sum())
    producer = producer_edit(group, context)
    if producer is not None and not samples[group.producer].is_empty:
        error = _relative_error(*producer, factors, samples[group.producer].tokens.float())
        for name, layer, edit in edits:
            reach = as_rows(layer.weight.detach().float(), edit.axis).square().sum(0).sqrt()
            x = samples[name].tokens.float().abs().mul_(reach * to_channels(error, edit))
            loss += float(x.pow(power).sum())
    return loss


def _relative_error(
    layer: QuantMixin, edit: Edit, factors: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return by how much of itself each output moves when its weights are rounded, (size,).

    Args:
        layer: A layer whose outputs are divided by factors.
        edit: What belongs to which factor.
        factors: (size,).
        x: Some of its inputs, (tokens, channels).
    """
    inputs_axis = 1 - edit.axis
    weight = layer.weight.detach().float()
    scaled = weight * along(to_channels(factors, edit), weight, edit.axis)
    rows = as_rows(scaled, inputs_axis)
    moved = x @ (as_rows(rounded_weight(layer, scaled), inputs_axis) - rows).T
    whole = (x @ rows.T).square().sum(0).clamp(min=1e-20)
    return to_factors((moved.square().sum(0) / whole).sqrt(), edit, len(factors), "amax")


def rounded_weight(layer: QuantMixin, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as the layer would quantize it."""
    return weight if layer.weight_quantizer is None else layer.weight_quantizer.rounded(weight)


def _groups(context: Context, options: AutoSmoothQuantConfig) -> list[ScaleGroup]:
    return usable_groups(
        context,
        "autosmoothquant",
        has_quantized_input,
        options.scaling_layers,
        options.model_decoder_layers,
    )


ALGORITHM = Algorithm(check, apply, resolve=resolve)
