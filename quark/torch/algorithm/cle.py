"""Cross-layer equalization (Nagel et al. 2019, section 4.1): channels of layers get equal ranges.

For two layers with y = W₂ f(W₁ x + b₁) and f(s z) = s f(z), such as ReLU, each channel i between
them is divided by

    s_i = sqrt(r1_i / r2_i)

with r1_i the largest magnitude in row i of W₁, and r2_i that in column i of W₂ (equation 11). Both
become sqrt(r1_i r2_i), so that no row and no column has a range that is much smaller than that of
the whole weight, which one scale serves. Chains of layers take several rounds. High biases can then
move into the next layer (section 4.1.3, ``bias_absorption.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from quark.torch.algorithm.bias_absorption import absorb_biases
from quark.torch.algorithm.layers import check_weights_quantized, has_quantized_weight, to_matrix
from quark.torch.algorithm.rescaling import reduce_to_factors
from quark.torch.graph.residency import resident
from quark.torch.graph.structure import RESCALING, RescalingGroup
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.context import Algorithm, Context
from quark.torch.pipeline.shapes import FLOAT32, PASS_READS, BlockShape, DataShape, Work
from quark.torch.quantization.config.algo import CLEConfig
from quark.torch.quantization.config.layer import QuantizationConfig

logger = logging.getLogger(__name__)

_SETTLED = 1e-3  # rounds end if no factor differs from 1 by more


def equalizing_factors(producer: torch.Tensor, consumers: torch.Tensor) -> torch.Tensor:
    """Return sqrt(r1 / r2), 1 for channels without weights.

    Args:
        producer: (channels,) largest magnitude of the weights that compute each channel.
        consumers: (channels,) likewise of the weights that read it.
    """
    is_used = (producer > 0) & (consumers > 0)
    return torch.where(is_used, producer / consumers.where(is_used, 1), 1).sqrt()


def check(options: CLEConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if the algorithm cannot be applied to these layers.

    Raises:
        ValueError: No weight is quantized.
    """
    check_weights_quantized(options, layers)
    weights = [layer.weight for layer in layers.values() if layer.weight is not None]
    if not any(spec.qscheme is QSchemeType.per_tensor for spec in weights):
        logger.warning(
            "cle: no weight has one scale for the whole tensor. Ranges of channels hardly matter "
            "with a scale for each channel or group; leave cle out."
        )


def resolve(context: Context, options: CLEConfig) -> Collection[str]:
    """Raise if nothing can be equalized; no input is rotated.

    Raises:
        ValueError: There is no pair of quantized layers.
    """
    _select_groups(context)
    return ()


def apply(context: Context, options: CLEConfig) -> None:
    """Equalize all pairs of quantized layers, round after round, and absorb biases if asked to."""
    groups = _select_groups(context)
    for rejection in context.structure.rejected:
        if rejection.producer in context.layers:
            logger.info("%s is not equalized: it %s.", rejection.producer, rejection.reason)
    for _ in range(options.iterations):
        if max(_equalize_(context, group) for group in groups) < _SETTLED:
            break
    logger.info("Equalized: %s.", ", ".join(group.producer for group in groups))
    if options.absorb_biases:
        absorb_biases(context, groups)


def _select_groups(context: Context) -> list[RescalingGroup]:
    """Return the groups with a quantized weight on both sides.

    Raises:
        ValueError: There is none.
    """
    groups = [group for group in context.structure.groups if _is_usable(context, group)]
    if not groups:
        reasons = sorted(f"{r.producer} {r.reason}" for r in context.structure.rejected)
        raise ValueError(
            "cle: no quantized layer is followed by another through operations such as ReLU and "
            f"pooling{f' ({reasons[0]})' if reasons else ''}. Fold batch norms first (graph mode "
            "does), or leave cle out."
        )
    return groups


def _is_usable(context: Context, group: RescalingGroup) -> bool:
    """Whether both sides have a quantized weight, and no consumer rotates its inputs."""
    weights = {edit.parameter: edit.power for edit in group.edits}
    layers = {name: context.layers.get(name) for name in (group.producer, *group.consumers)}
    is_multiplied = {
        power > 0
        for name, layer in layers.items()
        if layer is not None
        and has_quantized_weight(layer.quant_config)
        and (power := weights.get(f"{name}.weight")) is not None
    }
    is_rotated = any(
        name in context.rotated or (layer is not None and layer.input_rotation is not None)
        for name, layer in layers.items()
        if name != group.producer
    )
    return is_multiplied == {False, True} and not is_rotated


def _equalize_(context: Context, group: RescalingGroup) -> float:
    """Equalize one group in place, and return how far its factors are from 1."""
    with resident(context.model, *(edit.parameter for edit in group.edits)):
        factors = equalizing_factors(_ranges(context, group, -1), _ranges(context, group, 1))
        group.apply_(context.model, factors)
    return float(factors.log().abs().max())


def _ranges(context: Context, group: RescalingGroup, sign: int) -> torch.Tensor:
    """Return the largest magnitude of the weights of each factor, (size,) on the CPU.

    Args:
        context: The model.
        group: The group.
        sign: -1 for weights that are divided by the factors, 1 for those that are multiplied.
    """
    largest = torch.zeros(group.size, dtype=torch.float64, device="cpu")
    for edit in group.edits:
        weight = context.model.get_parameter(edit.parameter).detach()
        if edit.power * sign > 0 and weight.dim() > 1:  # biases and caps have one axis
            channels = to_matrix(weight, edit.axis).abs().amax(0).double().cpu()
            ranges = reduce_to_factors(channels, edit, group.size, "amax")
            largest = torch.maximum(largest, ranges)
    return largest


def work(options: CLEConfig, block: BlockShape, data: DataShape) -> Work:
    """Return the work for a block: its weights several times, and a float32 weight.

    Biases are absorbed by a pass over the data; proofs on one batch are left out.
    """
    memory = block.largest(lambda x: FLOAT32 * 2 * x.elements)
    flops = 10.0 * options.iterations * block.elements
    if not options.absorb_biases:
        return Work(memory, 0, flops, reads=options.iterations)
    reads = options.iterations + PASS_READS
    return Work(memory, 1, flops, stores=3, reads=reads, runs_model=True)


ALGORITHM = Algorithm(
    check,
    apply,
    needs_data=lambda options: options.absorb_biases,
    work=work,
    resolve=resolve,
    proves=lambda options: (RESCALING,),
)
