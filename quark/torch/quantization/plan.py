"""``Plan``: how a model will be quantized, and the steps that prepare it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quark.torch.graph.alignment import align_parameters
from quark.torch.graph.quantized_mark import set_mark
from quark.torch.pipeline.context import Algorithm
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.config.algo import AlgoConfig
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.nn.attention import Projections, route_projections
from quark.torch.quantization.nn.experts import corresponding_experts, split_experts, stack_experts
from quark.torch.quantization.nn.probabilities import quantize_probabilities
from quark.torch.quantization.preparation import replace_layers


@dataclass(frozen=True)
class Plan:
    """How a model will be quantized; every part has been checked.

    Attributes:
        config: Configuration with the names of the modules of the model.
        layers: Configuration of each layer that will be quantized, by its name.
        projections: Attention modules whose queries or keys are quantized after rotary embedding;
            see ``nn.attention.attention_projections``.
        probabilities: Attention modules whose probabilities are quantized; see
            ``nn.probabilities.probability_modules``.
        algorithms: Each algorithm with its options, in order.
        batches: Calibration data, () without.
        has_data: Whether calibration data was given.
        statistics: Statistics of the float model, or None.
        data_digest: Digest of the data that is used, or that statistics are of; None without.
    """

    config: Config
    layers: Mapping[str, QuantizationConfig]
    projections: Mapping[str, Projections]
    probabilities: Sequence[str]
    algorithms: Sequence[tuple[Algorithm, AlgoConfig]]
    batches: Iterable[Any]
    has_data: bool
    statistics: Statistics | None
    data_digest: str | None = None


def prepare(model: nn.Module, plan: Plan) -> None:
    """Prepare a float model for quantization, in place; ``ModelState`` restores it.

    Parameters with which data or an algorithm computes are aligned, and stay so.

    Args:
        model: The float model.
        plan: How to quantize it.
    """
    if plan.has_data or plan.algorithms:
        align_parameters(model)
    for step in PREPARATIONS:
        step(model, plan)


def _mark(model: nn.Module, plan: Plan) -> None:
    set_mark(model)


def _split_experts(model: nn.Module, plan: Plan) -> None:
    stack_experts(split_experts(model), keep=plan.layers)
    if plan.statistics is not None:
        _restore_token_counts(model, plan.statistics)


def _replace_layers(model: nn.Module, plan: Plan) -> None:
    replace_layers(model, plan.layers)


def _route_projections(model: nn.Module, plan: Plan) -> None:
    route_projections(model, plan.projections)


def _quantize_probabilities(model: nn.Module, plan: Plan) -> None:
    quantize_probabilities(model, plan.probabilities, plan.config.softmax_quant_spec)


def _restore_token_counts(model: nn.Module, statistics: Statistics) -> None:
    """Store the number of tokens that the data of the statistics sends to each expert."""
    for names in corresponding_experts(model):
        if all(name in statistics.readers for name in names):
            experts: Any = model.get_submodule(names[0].rsplit(".", 2)[0])
            counts = [int(statistics.tokens[statistics.first_reader(name)]) for name in names]
            experts.token_counts = {0: counts}


# Applied in this order.
PREPARATIONS = (
    _mark,
    _split_experts,
    _replace_layers,
    _route_projections,
    _quantize_probabilities,
)
