"""What each format would cost each layer of a model, from statistics alone.

A weight W that becomes W + D moves the outputs of its layer by tr(D G Dᵀ), squared and summed over
tokens, with G the sum of x xᵀ over its inputs. How much the predictions of the model mind was
measured once, under coarse rounding; so the loss of a format is its squared error times that, in
nats per token. Losses of layers are added up, which overstates the whole but tells mixtures apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from quark.torch.algorithm.gptq import round_layer
from quark.torch.algorithm.kept import Statistics
from quark.torch.algorithm.statistics import Gram
from quark.torch.export.formats.base import ExportFormat, get_format
from quark.torch.pipeline.inference import progress
from quark.torch.quantization.calibrate import calibrate_parameters, settle_weights
from quark.torch.quantization.config.algo import GPTQConfig
from quark.torch.quantization.config.config import NAMED_ONLY, Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import literal, matches
from quark.torch.quantization.nn.experts import fuse, unfuse
from quark.torch.quantization.nn.mixin import QuantMixin
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.prepare import plan, prepare, quantized_layers, restore
from quark.torch.search.allocate import Frontier
from quark.torch.statistics.collect import rounded, weight_error


@dataclass(frozen=True)
class Unit:
    """Layers that get one format, and what each format costs them.

    Attributes:
        layers: Their names.
        weights: Number of their weights.
        bits: Format to the stored bits of the weights: codes, scales, zero points.
        losses: Format to the loss, in nats per token.
    """

    layers: tuple[str, ...]
    weights: int
    bits: Mapping[str, int]
    losses: Mapping[str, float]


class Mixture:
    """The formats of all units under any budget.

    Args:
        units: What ``weigh`` returned.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.weights = sum(unit.weights for unit in units)
        self._frontier = Frontier(
            [list(unit.bits.values()) for unit in units],
            [list(unit.losses.values()) for unit in units],
        )

    def choose(self, bits_per_weight: float) -> dict[str, str]:
        """Return the format of each layer that loses least, by the name of the layer.

        Raises:
            ValueError: Even the smallest formats take more bits.
        """
        least = self._frontier.least / self.weights
        if bits_per_weight < least:
            raise ValueError(
                f"{bits_per_weight:g} bits per weight are less than "
                f"{math.ceil(1000 * least) / 1000:g}, what the smallest "
                "of the formats take with their scales. Ask for more, or allow smaller formats."
            )
        chosen = self._frontier.choose(bits_per_weight * self.weights + 0.5)
        names = [list(unit.bits)[index] for unit, index in zip(self.units, chosen, strict=True)]
        pairs = zip(self.units, names, strict=True)
        return {layer: name for unit, name in pairs for layer in unit.layers}

    def cost(self, chosen: Mapping[str, str]) -> tuple[float, float]:
        """Return bits per weight and loss of formats by the names of layers."""
        names = [chosen[unit.layers[0]] for unit in self.units]
        pairs = list(zip(self.units, names, strict=True))
        bits = sum(unit.bits[name] for unit, name in pairs)
        return bits / self.weights, sum(unit.losses[name] for unit, name in pairs)

    def points(self) -> list[tuple[float, float]]:
        """Return (bits per weight, loss) of all mixtures that no other one beats."""
        return [(bits / self.weights, loss) for bits, loss in self._frontier.points()]

    def uniform(self) -> dict[str, tuple[float, float]]:
        """Return bits per weight and loss with one format for all, by its name."""
        layers = [layer for unit in self.units for layer in unit.layers]
        return {name: self.cost(dict.fromkeys(layers, name)) for name in self.units[0].bits}


@torch.no_grad()
def weigh(
    model: nn.Module,
    statistics: Statistics,
    formats: Mapping[str, QuantizationConfig],
    exclude: Iterable[str] = (),
    together: bool = False,
    solved: bool = False,
) -> list[Unit]:
    """Find what each format costs each layer; no data runs.

    Args:
        model: The float model of the statistics. It is unchanged in the end.
        statistics: What ``collect_statistics`` returned for it.
        formats: Configurations of a layer, by a name each.
        exclude: Patterns of layers to leave in float.
        together: Whether layers that read the same tensor are to share a format, as software
            that fuses them expects.
        solved: Whether weights are rounded by GPTQ rather than to the nearest, for mixtures that
            GPTQ or its like will round.

    Raises:
        ValueError: A format quantizes more than weights, does not fit a layer, or the statistics
            are of another model or lack sensitivities.
    """
    _check(formats, statistics)
    statistics.check(model)
    patterns = list(exclude)
    units = [
        kept
        for unit in (_together(statistics) if together else statistics.units)
        if (kept := tuple(name for name in unit if not matches(name, patterns)))
    ]
    if not units:
        raise ValueError("exclude leaves no layer to choose a format for.")
    names = [name for unit in units for name in unit]
    experts = unfuse(model)
    try:
        costs = {
            name: _costs(model, statistics, names, layer, solved)
            for name, layer in progress(list(formats.items()), "formats")
        }
        sizes = {name: model.get_submodule(name).weight.numel() for name in names}  # type: ignore[operator]
    finally:
        fuse(experts)
    return [_unit(unit, sizes, costs) for unit in units]


def mixed_config(
    model: nn.Module, chosen: Mapping[str, str], formats: Mapping[str, QuantizationConfig]
) -> Config:
    """Return the configuration that gives layers their formats, and leaves all others alone.

    Args:
        model: The float model.
        chosen: Format of each layer, by its name.
        formats: Configurations of a layer, by the names of formats.
    """
    names = list(chosen.values())
    main = max(dict.fromkeys(names), key=names.count)
    experts = unfuse(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    fuse(experts)
    others = [n for n, kind in kinds.items() if is_operator(kind) and kind not in NAMED_ONLY]
    return Config(
        global_quant_config=formats[main],
        layer_quant_config={
            literal(layer): formats[name] for layer, name in chosen.items() if name != main
        },
        exclude=[literal(name) for name in others if name not in chosen],
    )


@contextmanager
def rounded_as(model: nn.Module, config: Config) -> Iterator[None]:
    """Let a model compute with weights rounded to the nearest, and give it back its own.

    Args:
        model: A float model.
        config: Configuration that quantizes weights alone.
    """
    experts = unfuse(model)
    try:
        prepare(model, plan(model, config))
        try:
            calibrate_parameters(model)
            yield
        finally:
            restore(model)
    finally:
        fuse(experts)


def _check(formats: Mapping[str, QuantizationConfig], statistics: Statistics) -> None:
    for name, layer in formats.items():
        if [tensor for tensor, _ in layer.specs()] != ["weight"]:
            raise ValueError(
                f"{name} quantizes more than weights, and what that costs is not known from "
                "statistics. Search among weight-only formats, such as int4_wo_128."
            )
    if not statistics.sensitivities:
        raise ValueError(
            "These statistics were collected without sensitivities (probes=0): collect them anew."
        )


def _together(statistics: Statistics) -> list[tuple[str, ...]]:
    """Return the units with those of one layer that read the same tensor united."""
    united: dict[str, list[str]] = {}
    for unit in statistics.units:
        key = statistics.readers[unit[0]] if len(unit) == 1 else unit[0]
        united.setdefault(key, []).extend(unit)
    return [tuple(unit) for unit in united.values()]


def _costs(
    model: nn.Module,
    statistics: Statistics,
    names: Sequence[str],
    layer: QuantizationConfig,
    solved: bool,
) -> dict[str, tuple[int, float]]:
    """Return the bits and the loss of a format for each layer."""
    fmt = get_format("quark", Config(), JsonExporterConfig())
    named = Config(layer_quant_config={literal(name): layer for name in names})
    prepare(model, plan(model, named))
    try:
        layers = dict(quantized_layers(model))
        return {name: _cost(name, layers[name], statistics, fmt, solved) for name in names}
    finally:
        restore(model)


def _cost(
    name: str, layer: QuantMixin, statistics: Statistics, fmt: ExportFormat, solved: bool
) -> tuple[int, float]:
    settle_weights({name: layer}, Config())
    stored = fmt.tensors(layer, {})
    bits = sum(8 * t.nbytes for part, t in stored.items() if part.startswith("weight"))
    gram = statistics.grams({name: layer})[name]
    weight = _solved(name, layer, gram) if solved and gram.tokens else rounded(layer)
    return bits, weight_error(layer, weight, gram) * statistics.sensitivities[name]


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


def _unit(
    names: tuple[str, ...],
    sizes: Mapping[str, int],
    costs: Mapping[str, Mapping[str, tuple[int, float]]],
) -> Unit:
    return Unit(
        names,
        sum(sizes[name] for name in names),
        {fmt: sum(found[name][0] for name in names) for fmt, found in costs.items()},
        {fmt: sum(found[name][1] for name in names) for fmt, found in costs.items()},
    )
