"""Milliseconds that a token takes in the layers of a model, measured on this machine.

Each shape of a layer is measured in each format, alone, with the product that a runtime has for it
and one row of inputs, as for a token that is generated. Values are random: no product depends on
them. The rest of a model (attention, norms, output head) takes the same time in every mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.pipeline.batches import show_progress
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.experts import temporarily_split_experts
from quark.torch.quantization.nn.runtime import check_runtime, set_runtime
from quark.torch.quantization.preparation import quantized_layers
from quark.torch.search.allocation import Frontier
from quark.torch.search.costs import Unit, find_problem
from quark.torch.search.mixtures import formats_of
from quark.torch.search.sizes import candidate_layers

ROUNDS = 5  # in which all formats of a shape take turns
LEAST_SECONDS = 0.01  # of calls in a round
_NANOSECONDS = 1e9

Seconds = Mapping[str, Mapping[str, float]]


class _Shape(NamedTuple):
    outputs: int
    inputs: int
    dtype: torch.dtype


def measure_times(
    model: nn.Module,
    formats: Mapping[str, QuantizationConfig],
    exclude: Iterable[str] = (),
    runtime: str = "fast",
    device: torch.device | str = "cpu",
) -> dict[str, dict[str, float]]:
    """Return the seconds of one row of inputs in each linear layer, by format, then by layer.

    Layers that a format does not fit are left out. Threads are those that torch has.

    Args:
        model: The float model; the values of its parameters are not read.
        formats: Configurations of a layer by name of the format.
        exclude: Patterns of layers to leave out, beside the output head.
        runtime: How packed layers compute; see ``set_runtime``.
        device: Where they compute.

    Raises:
        ValueError: The runtime is unknown.
    """
    check_runtime(runtime)
    fitting: dict[_Shape, dict[str, list[str]]] = {}
    with temporarily_split_experts(model):
        for name, (outputs, inputs) in candidate_layers(model, exclude).items():
            dtype = model.get_parameter(f"{name}.weight").dtype
            of_shape = fitting.setdefault(_Shape(outputs, inputs, dtype), {})
            for fmt, config in formats.items():
                if find_problem(model, [name], config) is None:
                    of_shape.setdefault(fmt, []).append(name)
    result: dict[str, dict[str, float]] = {fmt: {} for fmt in formats}
    for shape, names in show_progress(list(fitting.items()), "shapes"):
        seconds = _time_shape(shape, {fmt: formats[fmt] for fmt in names}, runtime, device)
        for fmt, layers in names.items():
            result[fmt] |= dict.fromkeys(layers, seconds[fmt])
    return result


def _time_shape(
    shape: _Shape,
    formats: Mapping[str, QuantizationConfig],
    runtime: str,
    device: torch.device | str,
) -> dict[str, float]:
    """Return the median seconds of one row of inputs in each format, which take turns."""
    x = torch.randn(1, shape.inputs, dtype=torch.float32, device="cpu").to(device, shape.dtype)
    timers = {
        fmt: Timer(
            "layer(x)",
            globals={"layer": _packed_layer(shape, config, runtime, device), "x": x},
            num_threads=torch.get_num_threads(),
        )
        for fmt, config in formats.items()
    }
    found: dict[str, list[float]] = {fmt: [] for fmt in formats}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for fmt, timer in timers.items():
                found[fmt].append(timer.blocked_autorange(min_run_time=LEAST_SECONDS).median)
    return {fmt: median(seconds) for fmt, seconds in found.items()}


def _packed_layer(
    shape: _Shape, config: QuantizationConfig, runtime: str, device: torch.device | str
) -> nn.Module:
    """Return a layer of random values as one of a loaded checkpoint."""
    linear: Any = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device)
    model = nn.Sequential(linear.to(shape.dtype))
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    ranges = torch.randn(2, shape.inputs, dtype=torch.float32, device="cpu").to(
        device, shape.dtype
    )  # of static inputs
    frozen = quantizer.freeze(quantizer.quantize_model(model, [ranges]))
    [(_, layer)] = quantized_layers(frozen)
    fmt = QuarkFormat(Config(), JsonExporterConfig())
    stored = fmt.layer_tensors(layer, {})
    empty = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device).to(shape.dtype)
    packed = nn.Sequential(fmt.prepare_for_load(empty, config))
    packed.load_state_dict({fmt.state_name(f"0.{part}"): value for part, value in stored.items()})
    return set_runtime(packed.eval(), runtime)


def times_of(units: Sequence[Unit], seconds: Seconds) -> list[dict[str, float]]:
    """Return the seconds of a token in each unit, by format.

    A token passes only some experts of a layer: their time counts by the share of the tokens that
    reach them.

    Args:
        units: The result of ``measure_costs``.
        seconds: The result of ``measure_times``.
    """
    return [
        {fmt: unit.share * sum(seconds[fmt][name] for name in unit.layers) for fmt in unit.bits}
        for unit in units
    ]


def time_of(units: Sequence[Unit], seconds: Seconds, chosen: Mapping[str, str]) -> float:
    """Return the seconds of a token in all units.

    Args:
        units: The result of ``measure_costs``.
        seconds: The result of ``measure_times``.
        chosen: Format of each layer, by its name.
    """
    times = zip(units, times_of(units, seconds), strict=True)
    return sum(of_unit[chosen[unit.layers[0]]] for unit, of_unit in times)


def choose_within_time(units: Sequence[Unit], seconds: Seconds, budget: float) -> dict[str, str]:
    """Return the format of each layer with the least loss within a time of a token.

    Args:
        units: The result of ``measure_costs``.
        seconds: The result of ``measure_times``.
        budget: Seconds of a token in all units.

    Raises:
        ValueError: Even the fastest formats take longer.
    """
    times = times_of(units, seconds)
    sizes = [[round(_NANOSECONDS * value) for value in of_unit.values()] for of_unit in times]
    frontier = Frontier(sizes, [list(unit.losses.values()) for unit in units])
    if round(_NANOSECONDS * budget) < frontier.least:
        least = 1e3 * frontier.least / _NANOSECONDS
        raise ValueError(
            f"{1e3 * budget:g} ms are less than {least:.4g} ms, the time of a token in the fastest "
            "formats. Give more, or allow faster formats."
        )
    return formats_of(units, frontier.choose(_NANOSECONDS * budget))
