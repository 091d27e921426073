"""SmoothQuant (Xiao et al. 2023, section 4): moves outliers from activations into weights.

Inputs are divided by factors s and the weights that read them multiplied by the same factors, with
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha) for channel j (equation 4).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch

from quark.torch.algorithm.layer_inputs import first_readers
from quark.torch.algorithm.layers import check_inputs_quantized, has_quantized_input, to_matrix
from quark.torch.algorithm.rescaling import (
    consumer_edits,
    reduce_to_factors,
    require_groups,
    select_groups,
)
from quark.torch.algorithm.smoothing import observe_ranges, smoothing_factors
from quark.torch.graph.residency import resident
from quark.torch.graph.structure import RESCALING, RescalingGroup
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import FLOAT32, PASS_READS, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import SmoothQuantConfig
from quark.torch.quantization.config.layer import QuantizationConfig

logger = logging.getLogger(__name__)

HIGH_ALPHA = 0.8  # above, weights with one scale lose accuracy


def check(options: SmoothQuantConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No input is quantized.
    """
    check_inputs_quantized(options, layers)
    weights = [layer.weight for layer in layers.values() if layer.weight is not None]
    is_per_tensor = any(spec.qscheme is QSchemeType.per_tensor for spec in weights)
    if options.alpha > HIGH_ALPHA and is_per_tensor:
        logger.warning(
            "smooth: alpha=%g gives the columns of weights very different magnitudes, but some "
            "weights have one scale. Use an alpha of 0.5 to %g, autosmoothquant, or weights per "
            "channel.",
            options.alpha,
            HIGH_ALPHA,
        )


def apply(context: Context, options: SmoothQuantConfig) -> None:
    """Smooth the inputs of all layers with quantized inputs, in one pass over the data.

    Raises:
        ValueError: No quantized input can be rescaled, or ``scaling_layers`` names layers that
            cannot be.
    """
    groups = select_groups(context, options, has_quantized_input)
    ranges = _observe_ranges(context, groups)
    for group in groups:
        inputs = [
            reduce_to_factors(ranges[name].amax, edit, group.size, "amax")
            for name, _, edit in consumer_edits(group, context)
            if name in ranges and ranges[name].lo is not None
        ]
        if inputs:  # empty for experts that received no token
            largest = torch.stack(inputs).amax(0)
            with resident(context.model, *(edit.parameter for edit in group.edits)):
                weights = largest_weights(group, context)
                factors = smoothing_factors(
                    largest, weights, options.alpha, options.scale_clamp_min
                )
                group.apply_(context.model, factors)


def _observe_ranges(context: Context, groups: list[RescalingGroup]) -> dict[str, ChannelRange]:
    """Return the range of each channel of the inputs of consumers, once for each tensor.

    The name is that of the first consumer in a group that reads the tensor.
    """
    firsts = [
        first
        for group in groups
        for first in first_readers(
            [name for name, _, _ in consumer_edits(group, context)], context
        ).values()
    ]
    return observe_ranges(context, dict.fromkeys(firsts))


def largest_weights(group: RescalingGroup, context: Context) -> torch.Tensor:
    """Return the largest magnitude of the weights that each factor multiplies, (size,)."""
    largest = []
    for edit in group.edits:
        if edit.power > 0:
            weight = context.model.get_parameter(edit.parameter).detach()
            channels = to_matrix(weight, edit.axis).float().abs().amax(0)
            largest.append(reduce_to_factors(channels, edit, group.size, "amax"))
    return torch.stack([x.to(largest[0].device) for x in largest]).amax(0)


def work(options: SmoothQuantConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: ranges of channels, which are small, and a float32 weight."""
    memory = block.largest(lambda x: FLOAT32 * 3 * x.elements)
    flops = 4.0 * data.tokens * sum(block.input_widths)
    return Work(memory, 1, flops, stores=3, reads=PASS_READS + 1, runs_model=True)


ALGORITHM = Algorithm(
    check,
    apply,
    work=work,
    resolve=partial(require_groups, predicate=has_quantized_input),
    proves=lambda options: (RESCALING,),
)
