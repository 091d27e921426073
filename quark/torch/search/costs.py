"""What a format costs layers of a model: stored bits, and the loss of predictions.

A weight W that becomes W + D moves the outputs of its layer by tr(D G Dᵀ), squared and summed over
tokens, with G the sum of x xᵀ over its inputs. Where inputs x become x + e too, outputs move by
D x + (W + D) e, and what that adds is found for some of the inputs. How much the predictions of the
model mind was measured once, under coarse rounding; so the loss of a format is its squared error
times that, in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.algorithm.awq import has_quantized_weight
from quark.torch.algorithm.gptq import round_layer
from quark.torch.algorithm.rescaling import as_rows
from quark.torch.export.formats.base import ExportFormat, get_format
from quark.torch.pipeline.accumulators import Gram
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.calibration import recall_activations, settle_weights
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.nn.layer import QuantMixin, is_transposed
from quark.torch.quantization.preparation import plan, prepare, quantized_layers, restore
from quark.torch.statistics.collection import rounded, weight_error


class Cost(NamedTuple):
    """What a format costs a layer.

    Attributes:
        bits: Stored bits of the weight: codes, scales, zero points.
        loss: Loss in nats per token.
    """

    bits: int
    loss: float


def layer_costs(
    model: nn.Module,
    statistics: Statistics,
    names: Sequence[str],
    layer: QuantizationConfig,
    solved: bool,
) -> dict[str, Cost]:
    """Return what a format costs each of some layers, by name.

    Args:
        model: The float model of the statistics, experts unfused. It is unchanged in the end.
        statistics: Its statistics.
        names: The layers, which the format fits.
        layer: The format.
        solved: Whether weights are rounded by GPTQ rather than to the nearest.
    """
    if not names:
        return {}
    fmt = get_format("quark", Config(), JsonExporterConfig())
    named = Config(layer_quant_config={literal(name): layer for name in names})
    prepare(model, plan(model, named))
    try:
        recall_activations(model, statistics)
        layers = dict(quantized_layers(model))
        return {name: _cost(name, layers[name], statistics, fmt, solved) for name in names}
    finally:
        restore(model)


def _cost(
    name: str, layer: QuantMixin, statistics: Statistics, fmt: ExportFormat, solved: bool
) -> Cost:
    settle_weights({name: layer}, Config())
    stored = fmt.tensors(layer, {})
    bits = sum(8 * t.nbytes for part, t in stored.items() if part.startswith("weight"))
    gram = statistics.grams({name: layer})[name]
    is_solved = solved and gram.total is not None and has_quantized_weight(layer.quant_config)
    weight = _solved(name, layer, gram) if is_solved else rounded(layer)
    error = weight_error(layer, weight, gram)
    sample = statistics.sample(name)
    if layer.input_quantizer is not None and sample is not None:
        error += input_error(layer, weight, sample) * gram.tokens / len(sample)
    return Cost(bits, max(error, 0.0) * statistics.sensitivities[name])


def input_error(layer: QuantMixin, weight: torch.Tensor, x: torch.Tensor) -> float:
    """Return what rounding inputs adds to the squared error of the outputs of a layer.

    Args:
        layer: The layer, which has its own weight. Ranges of inputs are settled.
        weight: The weight to look at instead.
        x: Inputs, (tokens, inputs).
    """
    axis = 0 if is_transposed(layer.float_class) else 1
    x = x.to(weight.device)
    lost = layer.quantized_input(x).float() - x.float()
    change = as_rows(weight.float() - layer.weight.detach().float(), axis)  # (outputs, inputs)
    added = lost @ as_rows(weight.float(), axis).T  # (tokens, outputs)
    return float((added * (added + 2 * (x.float() @ change.T))).sum())


def _solved(name: str, layer: QuantMixin, gram: Gram) -> torch.Tensor:
    """Return the weight of a layer as GPTQ rounds it; the layer keeps its own."""
    weight: torch.Tensor = layer.weight.detach()
    before = weight.clone()
    try:
        round_layer(name, layer, gram, GPTQConfig().damp_percent, GPTQConfig().desc_act)
        return weight.clone()
    finally:
        weight.copy_(before)
        layer.frozen = False
