"""Mixed precision: candidate formats of layers, their costs, and the best mixtures.

Costs come from statistics alone. The loss of a mixture is the sum of the losses of its layers. It
orders mixtures well, and departs from the measured loss: it is larger for two and three bits, and
smaller for more. ``loss_curve`` corrects it by a few measured mixtures.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.statistics import Statistics
from quark.torch.pipeline.tensor_ranges import ranges_suffice
from quark.torch.quantization.calibration import (
    calibrate_parameters,
    compute_scales_from_statistics,
)
from quark.torch.quantization.config.builder import build_config
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.layer_types import NAMED_ONLY
from quark.torch.quantization.config.match import literal, matches
from quark.torch.quantization.config.resolution import resolve_exclude
from quark.torch.quantization.nn.experts import temporarily_split_experts
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.preparation import (
    replace_layers,
    restore_layers,
    select_layers,
)
from quark.torch.search.allocation import Frontier
from quark.torch.search.costs import Cost, Unit, find_problem, layer_costs
from quark.torch.search.sizes import read_shares

logger = logging.getLogger(__name__)


class Mixture:
    """The best formats of all units for any budget.

    Args:
        units: The result of ``measure_costs``.
        per_token: Whether sizes are those of the weights that a token reads, instead of all; see
            ``sizes``.

    Attributes:
        weights: Number of these weights.
    """

    def __init__(self, units: Sequence[Unit], per_token: bool = False) -> None:
        self.units = units
        self._shares = [unit.share if per_token else 1.0 for unit in units]
        pairs = list(zip(units, self._shares, strict=True))
        self.weights = sum(unit.weights * share for unit, share in pairs)
        self._frontier = Frontier(
            [[round(bits * share) for bits in unit.bits.values()] for unit, share in pairs],
            [list(unit.losses.values()) for unit in units],
        )

    @property
    def least(self) -> float:
        """Bits per weight of the smallest formats."""
        return self._frontier.least / self.weights

    def choose(self, bits_per_weight: float) -> dict[str, str]:
        """Return the format of each layer in the mixture with the least loss, by name of the layer.

        Args:
            bits_per_weight: Maximum size.

        Raises:
            ValueError: Even the smallest formats need more bits.
        """
        if bits_per_weight < self.least:
            least = math.ceil(1000 * self.least) / 1000
            raise ValueError(
                f"{bits_per_weight:g} bits per weight are less than {least:g}, the size of the "
                "smallest formats with their scales. Give a larger size, or allow smaller formats."
            )
        chosen = self._frontier.choose(bits_per_weight * self.weights + 0.5)
        return formats_of(self.units, chosen)

    def cost(self, chosen: Mapping[str, str]) -> tuple[float, float]:
        """Return bits per weight and loss of a mixture.

        Args:
            chosen: Format of each layer, by its name.
        """
        names = [chosen[unit.layers[0]] for unit in self.units]
        pairs = list(zip(self.units, names, self._shares, strict=True))
        bits = sum(unit.bits[name] * share for unit, name, share in pairs)
        return bits / self.weights, sum(unit.losses[name] for unit, name, _ in pairs)

    def points(self) -> list[tuple[float, float]]:
        """Return (bits per weight, loss) of all mixtures on the frontier, by size."""
        return [(bits / self.weights, loss) for bits, loss in self._frontier.points()]

    def uniform(self) -> dict[str, tuple[float, float]]:
        """Return bits per weight and loss of each format that fits all layers, used for all."""
        layers = [layer for unit in self.units for layer in unit.layers]
        names = [n for n in self.units[0].bits if all(n in unit.bits for unit in self.units)]
        return {name: self.cost(dict.fromkeys(layers, name)) for name in names}


def formats_of(units: Sequence[Unit], chosen: Sequence[int]) -> dict[str, str]:
    """Return the format of each layer by its name, given the index of the format of each unit."""
    names = [list(unit.bits)[index] for unit, index in zip(units, chosen, strict=True)]
    pairs = zip(units, names, strict=True)
    return {layer: name for unit, name in pairs for layer in unit.layers}


@torch.no_grad()
def measure_costs(
    model: nn.Module,
    statistics: Statistics,
    formats: Mapping[str, QuantizationConfig],
    exclude: Iterable[str] = (),
    share_formats: bool = False,
    solved: bool = False,
) -> list[Unit]:
    """Return the cost of each format for each layer; no data runs.

    Args:
        model: The float model of the statistics. It is unchanged afterwards.
        statistics: The result of ``collect_statistics`` for it.
        formats: Configurations of a layer's weight, or of weight and inputs, by name of the format.
            A format that does not fit some layers is left out for them, with a warning.
        exclude: Patterns of layers that stay in float.
        share_formats: Whether layers that read the same tensor get the same format, which software
            that fuses them needs.
        solved: Whether weights are rounded by GPTQ instead of to the nearest, for mixtures that
            GPTQ or a similar algorithm will round.

    Raises:
        ValueError: A format quantizes no weight, or outputs or a bias; no format fits a layer; or
            the statistics are of another model, lack sensitivities or lack static ranges.
    """
    check_formats(formats)
    if not statistics.probes:
        raise ValueError(
            "These statistics were collected without sensitivities (probes=0): collect them with "
            "probes=1 (quark collect --probes 1)."
        )
    statistics.check(model)
    patterns = resolve_exclude(list(exclude), model)
    units = [
        names
        for unit in (_unite_shared_inputs(statistics) if share_formats else statistics.units)
        if (names := tuple(name for name in unit if not matches(name, patterns)))
    ]
    if not units:
        raise ValueError("exclude leaves no layer to choose a format for.")
    layers = [name for unit in units for name in unit]
    with temporarily_split_experts(model):
        fitting = _find_fitting(model, formats, units)
        costs = {
            name: layer_costs(model, statistics, fitting[name], config, solved)
            for name, config in show_progress(list(formats.items()), "formats")
        }
        sizes = {name: model.get_submodule(name).weight.numel() for name in layers}  # type: ignore[operator]
    shares = read_shares(statistics)
    owners = {name: unit[0] for unit in statistics.units for name in unit}
    return [_make_unit(unit, sizes, costs, shares, statistics, owners) for unit in units]


def mixed_config(
    model: nn.Module, chosen: Mapping[str, str], formats: Mapping[str, QuantizationConfig]
) -> Config:
    """Return the configuration that quantizes layers to their formats and excludes all others.

    Args:
        model: The float model.
        chosen: Format of each layer, by its name.
        formats: Configurations of a layer, by the names of formats.
    """
    names = list(chosen.values())
    main = max(dict.fromkeys(names), key=names.count)
    with temporarily_split_experts(model):
        kinds = {name: type(module) for name, module in model.named_modules()}
    others = [n for n, kind in kinds.items() if is_operator(kind) and kind not in NAMED_ONLY]
    return build_config(
        formats[main],
        layers={literal(layer): formats[name] for layer, name in chosen.items() if name != main},
        exclude=[literal(name) for name in others if name not in chosen],
    )


@contextmanager
def temporarily_quantized(
    model: nn.Module, config: Config, statistics: Statistics
) -> Iterator[None]:
    """Quantize a model inside the context, with weights rounded to the nearest.

    Args:
        model: A float model, which is restored afterwards.
        config: The result of ``mixed_config`` for it.
        statistics: Its statistics, which hold static ranges of inputs.
    """
    with temporarily_split_experts(model):
        replace_layers(model, select_layers(model, config))
        try:
            calibrate_parameters(model)
            compute_scales_from_statistics(model, statistics)
            yield
        finally:
            restore_layers(model)


def check_formats(formats: Mapping[str, QuantizationConfig]) -> None:
    """Raise if statistics are not enough to compute the costs of formats.

    Raises:
        ValueError: A format quantizes no weight, or outputs or a bias, or statistics lack its
            static ranges of inputs.
    """
    for name, layer in formats.items():
        tensors = [tensor for tensor, _ in layer.specs()]
        if "weight" not in tensors or not {*tensors} <= {"weight", "input_tensors"}:
            raise ValueError(
                f"{name} quantizes {' and '.join(tensors) or 'nothing'}, but statistics give the "
                "cost of rounding weights, or weights and inputs (input_tensors). Search among "
                "such formats, for example int4_wo_128 and ptpc_int8."
            )
        if layer.input_tensors is not None and not ranges_suffice(layer.input_tensors):
            raise ValueError(
                f"{name} has static ranges of inputs that statistics do not hold. Search among "
                "formats with dynamic ranges, or ranges by minimum and maximum or by a histogram."
            )


def _find_fitting(
    model: nn.Module,
    formats: Mapping[str, QuantizationConfig],
    units: Sequence[tuple[str, ...]],
) -> dict[str, list[str]]:
    """Return the layers of the units that each format fits as a whole, by format.

    Raises:
        ValueError: No format fits a unit.
    """
    problems: dict[str, dict[tuple[str, ...], str]] = {
        name: {unit: reason for unit in units if (reason := find_problem(model, unit, layer))}
        for name, layer in formats.items()
    }
    for unit in units:
        if all(unit in reasons for reasons in problems.values()):
            raise ValueError(
                f"None of the formats fits {unit[0]}, so add one that does: "
                + " ".join(f"{name}: {reasons[unit]}" for name, reasons in problems.items())
            )
    for name, reasons in problems.items():
        if reasons:
            layers = [layer for unit in reasons for layer in unit]
            reason = next(iter(reasons.values()))
            logger.warning("%s is left out for %d layers: %s", name, len(layers), reason)
    return {
        name: [layer for unit in units if unit not in reasons for layer in unit]
        for name, reasons in problems.items()
    }


def _unite_shared_inputs(statistics: Statistics) -> list[tuple[str, ...]]:
    """Return the units, with single layers that read the same tensor united to one unit."""
    united: dict[str, list[str]] = {}
    for unit in statistics.units:
        key = statistics.readers[unit[0]] if len(unit) == 1 else unit[0]
        united.setdefault(key, []).extend(unit)
    return [tuple(unit) for unit in united.values()]


def _make_unit(
    names: tuple[str, ...],
    sizes: Mapping[str, int],
    costs: Mapping[str, Mapping[str, Cost]],
    shares: Mapping[str, float],
    statistics: Statistics,
    owners: Mapping[str, str],
) -> Unit:
    fitting = {
        fmt: [of_layer[name] for name in names]
        for fmt, of_layer in costs.items()
        if names[0] in of_layer
    }
    weights = sum(sizes[name] for name in names)
    return Unit(
        names,
        weights,
        {fmt: sum(cost.bits for cost in of_layers) for fmt, of_layers in fitting.items()},
        {fmt: _sum_losses(names, costs[fmt], statistics, owners) for fmt in fitting},
        sum(sizes[name] * shares[name] for name in names) / weights,
    )


def _sum_losses(
    names: Iterable[str],
    costs: Mapping[str, Cost],
    statistics: Statistics,
    owners: Mapping[str, str],
) -> float:
    """Return the loss of layers in a format: of experts together, of other layers one by one.

    Args:
        names: The layers.
        costs: Their costs, by name.
        statistics: The statistics.
        owners: Layer to the first layer of its unit in the statistics.
    """
    errors: dict[str, float] = defaultdict(float)
    for name in names:
        errors[owners[name]] += costs[name].error
    return sum(statistics.loss(owner, error) for owner, error in errors.items())
