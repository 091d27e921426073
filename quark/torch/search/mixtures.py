"""The formats that layers of a model may get, what each would cost, and mixtures of them.

Costs come from statistics alone. Losses of layers are added up, which overstates the whole but
tells mixtures apart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from quark.torch.pipeline.batches import progress
from quark.torch.pipeline.statistics import Statistics
from quark.torch.pipeline.tensor_ranges import is_told
from quark.torch.quantization.calibration import calibrate_parameters, recall_activations
from quark.torch.quantization.config.config import NAMED_ONLY, Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.match import literal, matches
from quark.torch.quantization.nn.experts import fuse, unfuse
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.preparation import check_fit, plan, prepare, restore
from quark.torch.search.allocation import Frontier
from quark.torch.search.costs import Cost, layer_costs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """Layers that get one format, and what each format costs them.

    Attributes:
        layers: Their names.
        weights: Number of their weights.
        bits: Format to the stored bits of the weights: codes, scales, zero points. Formats that
            do not fit all of the layers are left out.
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
        """Return bits per weight and loss with one format for all, by its name, if it fits all."""
        layers = [layer for unit in self.units for layer in unit.layers]
        names = [n for n in self.units[0].bits if all(n in unit.bits for unit in self.units)]
        return {name: self.cost(dict.fromkeys(layers, name)) for name in names}


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
        formats: Configurations of a layer's weight, or of weight and inputs, by a name each. One
            that does not fit some layers is left out there, with a warning.
        exclude: Patterns of layers to leave in float.
        together: Whether layers that read the same tensor are to share a format, as software
            that fuses them expects.
        solved: Whether weights are rounded by GPTQ rather than to the nearest, for mixtures that
            GPTQ or its like will round.

    Raises:
        ValueError: A format quantizes no weight, or outputs or a bias; no format fits a layer; or
            the statistics are of another model, lack sensitivities or do not tell static ranges.
    """
    check_formats(formats)
    if not statistics.sensitivities:
        raise ValueError(
            "These statistics were collected without sensitivities (probes=0): collect them anew."
        )
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
        fitting = _fitting(model, formats, units)
        costs = {
            name: layer_costs(model, statistics, fitting[name], layer, solved)
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
def rounded_as(model: nn.Module, config: Config, statistics: Statistics) -> Iterator[None]:
    """Let a model compute with weights rounded to the nearest, and give it back its own.

    Args:
        model: A float model.
        config: What ``mixed_config`` returned for it.
        statistics: Its statistics, which tell static ranges of inputs.
    """
    experts = unfuse(model)
    try:
        prepare(model, plan(model, config))
        try:
            calibrate_parameters(model)
            recall_activations(model, statistics)
            yield
        finally:
            restore(model)
    finally:
        fuse(experts)


def check_formats(formats: Mapping[str, QuantizationConfig]) -> None:
    """Raise if statistics cannot tell what formats cost.

    Raises:
        ValueError: One quantizes no weight, or outputs or a bias, or its static ranges of inputs
            are not told.
    """
    for name, layer in formats.items():
        tensors = [tensor for tensor, _ in layer.specs()]
        if "weight" not in tensors or not {*tensors} <= {"weight", "input_tensors"}:
            raise ValueError(
                f"{name} quantizes {' and '.join(tensors) or 'nothing'}, and statistics tell what "
                "rounding weights costs, or weights and inputs (input_tensors). Search among "
                "formats of these, such as int4_wo_128 and ptpc_int8."
            )
        if layer.input_tensors is not None and not is_told(layer.input_tensors):
            raise ValueError(
                f"{name} has static ranges of inputs that statistics do not tell. Search among "
                "formats that take the minimum and maximum, a histogram, or dynamic ranges."
            )


def _fitting(
    model: nn.Module,
    formats: Mapping[str, QuantizationConfig],
    units: Sequence[tuple[str, ...]],
) -> dict[str, list[str]]:
    """Return the layers that each format can be given to: those of units it fits as a whole.

    Raises:
        ValueError: No format fits a unit.
    """
    problems: dict[str, dict[tuple[str, ...], str]] = {
        name: {unit: said for unit in units if (said := _problem(model, unit, layer))}
        for name, layer in formats.items()
    }
    for unit in units:
        if all(unit in found for found in problems.values()):
            raise ValueError(
                f"None of the formats fits {unit[0]}, so add one that does: "
                + " ".join(f"{name}: {found[unit]}" for name, found in problems.items())
            )
    for name, found in problems.items():
        if found:
            layers = [layer for unit in found for layer in unit]
            reason = next(iter(found.values()))
            logger.warning("%s is left out for %d layers: %s", name, len(layers), reason)
    return {
        name: [layer for unit in units if unit not in found for layer in unit]
        for name, found in problems.items()
    }


def _problem(model: nn.Module, unit: Sequence[str], layer: QuantizationConfig) -> str | None:
    """Return why a format does not fit a unit, or None."""
    try:
        for name in unit:
            check_fit(name, model.get_submodule(name), layer)
    except ValueError as error:
        return str(error)
    return None


def _together(statistics: Statistics) -> list[tuple[str, ...]]:
    """Return the units with those of one layer that read the same tensor united."""
    united: dict[str, list[str]] = {}
    for unit in statistics.units:
        key = statistics.readers[unit[0]] if len(unit) == 1 else unit[0]
        united.setdefault(key, []).extend(unit)
    return [tuple(unit) for unit in united.values()]


def _unit(
    names: tuple[str, ...],
    sizes: Mapping[str, int],
    costs: Mapping[str, Mapping[str, Cost]],
) -> Unit:
    fitting = {fmt: [found[n] for n in names] for fmt, found in costs.items() if names[0] in found}
    return Unit(
        names,
        sum(sizes[name] for name in names),
        {fmt: sum(cost.bits for cost in found) for fmt, found in fitting.items()},
        {fmt: sum(cost.loss for cost in found) for fmt, found in fitting.items()},
    )
