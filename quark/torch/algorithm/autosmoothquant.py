"""AutoSmoothQuant: SmoothQuant with a search for the strength of each rescaling.

Inputs are divided by max|x|^alpha, centred on 1, and weights multiplied by it. The search takes
the alpha among 0, 0.1, … 1 under which the outputs of the quantized layers change least. For
SmoothQuant see Xiao et al. 2023, section 4.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from quark.torch.algorithm.layer_inputs import observe_block
from quark.torch.algorithm.layers import (
    check_inputs_quantized,
    has_quantized_input,
    weight_matrix,
)
from quark.torch.algorithm.rescaling import (
    consumer_edits,
    expand_to_channels,
    fake_quantized_matrix,
    groups_by_unit,
    producer_edit,
    reduce_to_factors,
    rescaled_units,
    select_groups,
)
from quark.torch.algorithm.smoothing import centred, fake_quantized_inputs
from quark.torch.graph.structure import RESCALING, Edit, RescalingGroup
from quark.torch.pipeline.accumulators import InputSample
from quark.torch.pipeline.block import Block
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.runner import run_blocks
from quark.torch.pipeline.shapes import FLOAT32, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import AutoSmoothQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

logger = logging.getLogger(__name__)

STEPS = 10  # strengths of the search: 0.1, 0.2, … 1
TOKENS = 1024  # size of the sample on which errors are measured
POWERS = {"MSE": 2.0, "MAE": 1.0}


def check(options: AutoSmoothQuantConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No input is quantized, or ``compute_scale_loss`` is unknown.
    """
    if _get_loss_name(options) not in POWERS:
        raise ValueError(
            f"autosmoothquant: compute_scale_loss={options.compute_scale_loss!r} is unknown: "
            "give MSE or MAE."
        )
    check_inputs_quantized(options, layers)


def resolve(context: Context, options: AutoSmoothQuantConfig) -> Collection[str]:
    """Raise if nothing can be rescaled within a block; no input is rotated.

    Raises:
        ValueError: As in ``select_groups``, or all groups lie in several blocks.
    """
    by_unit = groups_by_unit(context, select_groups(context, options, has_quantized_input))
    if not any(by_unit):
        raise ValueError(
            f"autosmoothquant: the layers that can be rescaled together, such as "
            f"{by_unit[''][0].producer} and {by_unit[''][0].consumers[0]}, lie in different blocks "
            "of the model, and it searches block by block. Use smooth."
        )
    return ()


def apply(context: Context, options: AutoSmoothQuantConfig) -> None:
    """Choose the strength of each rescaling by the outputs of its consumers.

    Errors compare these outputs with weights and inputs quantized as configured, on a sample of
    tokens; static ranges are those of all tokens. No rescaling is a candidate too.

    Raises:
        ValueError: No quantized input can be rescaled, or ``scaling_layers`` names layers that
            cannot be.
    """
    by_unit = groups_by_unit(context, select_groups(context, options, has_quantized_input))
    if by_unit.pop("", None):
        logger.info("autosmoothquant does not rescale layers of different blocks together.")
    names = rescaled_units(context, by_unit, False)
    for block in run_blocks(
        context.model, names, context.batches, "autosmoothquant", journal=context.journal
    ):
        groups = by_unit.get(block.name, [])
        samples = _observe(context, block, groups)
        for group in groups:
            _rescale(group, context, samples, POWERS[_get_loss_name(options)])


def scaling_factors(inputs: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return factors max|x|^alpha, centred on 1; channels that are always zero get 1.

    Args:
        inputs: Largest magnitude of each channel, (channels,).
        alpha: From 0 (no change) to 1 (all channels of the inputs get the same range).
    """
    used = inputs > 0
    return centred(torch.where(used, inputs, 1.0) ** alpha, used)


def _get_loss_name(options: AutoSmoothQuantConfig) -> str:
    return (options.compute_scale_loss or "MSE").upper()


def _observe(
    context: Context, block: Block, groups: list[RescalingGroup]
) -> dict[str, InputSample]:
    """Return samples of the inputs of all producers and consumers, by one pass of the data."""
    names = [name for group in groups for name, _, _ in consumer_edits(group, context)]
    names += [group.producer for group in groups if producer_edit(group, context)]
    # Numbers of tokens in different leaves are different: a leaf has fewer than 2²⁴ tokens.
    return observe_block(context, block, names, lambda leaf: InputSample(TOKENS, leaf << 24))


def _rescale(
    group: RescalingGroup, context: Context, samples: dict[str, InputSample], power: float
) -> None:
    """Apply the factors under which the outputs of all consumers change least."""
    edits = [e for e in consumer_edits(group, context) if not samples[e[0]].is_empty]
    if not edits:
        return
    ranges = [reduce_to_factors(samples[n].range.amax, e, group.size, "amax") for n, _, e in edits]
    inputs = torch.stack(ranges).amax(0)
    strengths = [step / STEPS for step in range(1, STEPS + 1)]
    candidates = [torch.ones_like(inputs), *(scaling_factors(inputs, a) for a in strengths)]
    losses = processes().measure(
        candidates, lambda factors: _measure_loss(factors, group, context, samples, power)
    )
    best = candidates[losses.index(min(losses))]
    group.apply_(context.model, best)
    for sample, edit in {id(samples[n]): (samples[n], e) for n, _, e in edits}.values():
        sample.rescale_(expand_to_channels(best, edit))


def _measure_loss(
    factors: torch.Tensor,
    group: RescalingGroup,
    context: Context,
    samples: dict[str, InputSample],
    power: float,
) -> float:
    """Return the error of the outputs of all consumers, plus that caused by the producer."""
    loss = 0.0
    edits = [edit for edit in consumer_edits(group, context) if not samples[edit[0]].is_empty]
    for name, layer, edit in edits:
        sample = samples[name]
        by = expand_to_channels(factors, edit)
        matrix, x = weight_matrix(layer), sample.tokens.float()
        lo, hi = sample.range.lo, sample.range.hi
        assert lo is not None and hi is not None
        rounded = fake_quantized_matrix(layer, matrix * by)
        inputs = fake_quantized_inputs(layer, x / by, lo / by, hi / by)
        change = inputs @ rounded.T - x @ matrix.T
        loss += float(change.abs().pow(power).sum())
    producer = producer_edit(group, context)
    if producer is not None and not samples[group.producer].is_empty:
        error = _measure_relative_error(*producer, factors, samples[group.producer].tokens.float())
        for name, layer, edit in edits:
            norms = weight_matrix(layer).square().sum(0).sqrt()
            x = samples[name].tokens.float().abs().mul_(norms * expand_to_channels(error, edit))
            loss += float(x.pow(power).sum())
    return loss


def _measure_relative_error(
    layer: FakeQuantizedLayer, edit: Edit, factors: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return the relative error of the outputs of a producer with rounded weights, (size,).

    Args:
        layer: A layer whose outputs are divided by factors.
        edit: Factor of each output.
        factors: (size,).
        x: A sample of its inputs, (tokens, channels).
    """
    matrix = weight_matrix(layer) * expand_to_channels(factors, edit).unsqueeze(1)
    rounded = fake_quantized_matrix(layer, matrix)
    change = x @ (rounded - matrix).T
    squares = (x @ matrix.T).square().sum(0).clamp(min=1e-20)
    ratio = (change.square().sum(0) / squares).sqrt()
    return reduce_to_factors(ratio, edit, len(factors), "amax")


def work(options: AutoSmoothQuantConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: samples of its inputs, products with candidates."""
    tokens = min(TOKENS, data.tokens)
    samples = sum(FLOAT32 * 2 * tokens * width for width in block.input_widths)
    products = block.largest(
        lambda x: FLOAT32 * (8 * x.elements + 4 * tokens * (x.inputs + x.outputs))
    )
    flops = (STEPS + 1) * sum(4.0 * tokens * x.elements + 50 * x.elements for x in block.layers)
    return Work(samples + products, 1, flops, stores=3)


ALGORITHM = Algorithm(
    check,
    apply,
    work=work,
    resolve=resolve,
    proves=lambda options: (RESCALING,),
)
