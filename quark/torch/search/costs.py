"""Cost of a format for layers of a model: stored bits, and loss of the predictions.

A change D of a weight W causes the squared error tr(D G Dᵀ) of the outputs, summed over tokens,
with G the sum of x xᵀ over the inputs x. If inputs become x + e too, outputs change by
D x + (W + D) e, and the additional error is measured on a sample of the inputs. The loss of a
format, in nats per token, follows from its squared error and from the loss that was measured once
under coarse rounding (``Statistics.loss``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.layers import has_quantized_weight, to_matrix
from quark.torch.algorithm.weight_rounding import round_layer
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.graph.residency import resident
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.calibration import (
    compute_scales_from_statistics,
    compute_weight_scales,
)
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.preparation import (
    check_fit,
    quantized_layers,
    replace_layers,
    restore_layers,
    select_layers,
)
from quark.torch.statistics.sensitivities import round_to_nearest, weight_error


class Cost(NamedTuple):
    """Cost of a format for a layer.

    Attributes:
        bits: Stored bits of the weight: codes, scales, zero points.
        error: Squared error of the outputs, summed over all tokens of the data.
    """

    bits: int
    error: float


@dataclass(frozen=True)
class Unit:
    """Layers that get the same format, and the cost of each format.

    Attributes:
        layers: Their names.
        weights: Number of their weights.
        bits: Format to the stored bits of the weights: codes, scales, zero points. Formats that
            do not fit each of the layers are left out.
        losses: Format to the loss, in nats per token.
        share: Share of the weights that a token reads: below 1 for experts.
    """

    layers: tuple[str, ...]
    weights: int
    bits: Mapping[str, int]
    losses: Mapping[str, float]
    share: float = 1.0


def find_problem(model: nn.Module, unit: Sequence[str], layer: QuantizationConfig) -> str | None:
    """Return the reason why a format does not fit a unit, or None."""
    try:
        for name in unit:
            check_fit(name, model.get_submodule(name), layer)
    except ValueError as error:
        return str(error)
    return None


def stored_bits(
    config: QuantizationConfig, shape: tuple[int, ...], is_transposed: bool = False
) -> int:
    """Return the bits that the weight of a layer takes in a checkpoint: codes, scales, zero points.

    Args:
        config: How the layer is quantized, its weight at least.
        shape: Shape of the weight.
        is_transposed: Whether the weight is (in, out) instead of (out, in).
    """
    assert config.weight is not None
    layout = QuarkFormat(Config(), JsonExporterConfig()).layout_of(config)
    parts = layout.declare(config.weight.for_parameter(is_transposed), shape, True)
    return sum(8 * math.prod(size) * dtype.itemsize for size, dtype in parts.values())


def layer_costs(
    model: nn.Module,
    statistics: Statistics,
    names: Sequence[str],
    layer: QuantizationConfig,
    solved: bool,
) -> dict[str, Cost]:
    """Return the cost of a format for each of the given layers, by name.

    Args:
        model: The float model of the statistics, with experts split. It is unchanged afterwards.
        statistics: Its statistics.
        names: The layers, each with a shape that the format fits.
        layer: The format.
        solved: Whether weights are rounded by GPTQ instead of to the nearest.
    """
    if not names:
        return {}
    named = Config(layer_quant_config={literal(name): layer for name in names})
    replace_layers(model, select_layers(model, named))
    try:
        compute_scales_from_statistics(model, statistics)
        layers, costs = dict(quantized_layers(model)), dict[str, Cost]()
        for name in names:
            with resident(model, name):
                costs[name] = _compute_cost(name, layers[name], statistics, solved)
        return costs
    finally:
        restore_layers(model)


def _compute_cost(
    name: str, layer: FakeQuantizedLayer, statistics: Statistics, solved: bool
) -> Cost:
    compute_weight_scales({name: layer}, Config())
    bits = stored_bits(layer.quant_config, tuple(layer.weight.shape), layer.input_axis == 0)
    gram = statistics.grams({name: layer})[name]
    is_solved = solved and gram.total is not None and has_quantized_weight(layer.quant_config)
    weight = _round_by_gptq(name, layer, gram) if is_solved else round_to_nearest(layer)
    error = weight_error(layer, weight, gram)
    sample = statistics.sample(name)
    if layer.input_quantizer is not None and sample is not None:
        error += input_error(layer, weight, sample) * gram.tokens / len(sample)
    return Cost(bits, max(error, 0.0))


def input_error(layer: FakeQuantizedLayer, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Return the squared error of the outputs of a layer that rounding its inputs adds.

    Args:
        layer: The layer, with its float weight and final scales of inputs.
        weight: The rounded weight.
        x: Inputs, (tokens, inputs).
    """
    axis = layer.input_axis
    x = x.to(weight.device)
    input_change = layer.quantized_input(x).float() - x.float()  # e
    change = to_matrix(weight.float() - layer.weight.detach().float(), axis)  # D, (outputs, inputs)
    added = input_change @ to_matrix(weight.float(), axis).T  # (W + D) e, (tokens, outputs)
    # |D x + (W + D) e|² - |D x|² = a (a + 2 D x) with a = (W + D) e.
    return float((added * (added + 2 * (x.float() @ change.T))).sum())


def _round_by_gptq(name: str, layer: FakeQuantizedLayer, gram: Gram) -> torch.Tensor:
    """Return the weight of a layer as GPTQ rounds it; the layer keeps its float weight."""
    weight: torch.Tensor = layer.weight.detach()
    before = weight.clone()
    try:
        round_layer(name, layer, gram, GPTQConfig().damp_percent, GPTQConfig().desc_act)
        return weight.clone()
    finally:
        weight.copy_(before)
        layer.frozen = False
