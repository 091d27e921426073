"""Calibration: compute the scales of a prepared model from weights, data or statistics."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.graph.residency import iterate_parts
from quark.torch.numerics.finite import is_finite
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.batches import show_progress
from quark.torch.pipeline.model_pass import run_data
from quark.torch.pipeline.processes import alone, processes
from quark.torch.pipeline.statistics import Statistics
from quark.torch.pipeline.tensor_ranges import can_combine, combine_observers
from quark.torch.quantization.cache_scales import search_head_scales, searches_heads
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.config.tensor_names import PARAMETERS
from quark.torch.quantization.nn.experts import corresponding_experts
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.linear_experts import LinearExperts
from quark.torch.quantization.nn.quantizer import PARTS, QuantizedTensor, TensorQuantizer
from quark.torch.quantization.plan import Plan
from quark.torch.quantization.preparation import quantized_layers

logger = logging.getLogger(__name__)


def needs_data(layers: Iterable[Any]) -> bool:
    """Whether a configuration of these layers has static activations, which need data."""
    return any(
        name not in PARAMETERS and spec.needs_data
        for layer in layers
        for name, spec in layer.specs()
    )


def requires_data(layers: Iterable[Any]) -> bool:
    """Whether a configuration of these layers has static activations that cannot start untrained.

    Trained ranges start from the first batch of training if there is no data.
    """
    return any(
        name not in PARAMETERS and spec.needs_data and spec.range_training is None
        for layer in layers
        for name, spec in layer.specs()
    )


def calibrate(model: nn.Module, plan: Plan) -> None:
    """Compute the scales of weights, biases and static activations of a prepared model.

    Data or statistics give the ranges of activations; data if there is both.

    Raises:
        ValueError: A value is NaN or infinite, or a layer saw no data.
    """
    calibrate_parameters(model, plan.config)
    if next(_static_activations(model), None) is not None:
        if plan.has_data:
            calibrate_activations(model, plan.batches)
            if searches_heads(plan.config):
                with disabled_quantizers(model), alone():
                    search_head_scales(model, plan.batches)
        elif plan.statistics is not None:
            compute_scales_from_statistics(model, plan.statistics)
    share_activation_scales(model, plan.config)


def share_token_counts(model: nn.Module) -> None:
    """Let every process have the number of tokens that the data of all sends to each expert."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LinearExperts)}
    own = {name: layer.token_counts for name, layer in layers.items()}
    for counts in processes().exchange(own):
        for name, layer in layers.items():
            layer.token_counts |= {int(number): n for number, n in counts[name].items()}


def calibrate_parameters(model: nn.Module, config: Config | None = None) -> None:
    """Compute the scales of weights and biases.

    Args:
        model: A prepared model.
        config: Its configuration, by which layers share scales of weights; None for none that do.

    Raises:
        ValueError: A weight or bias has NaN or infinite values; the layer is named.
    """
    layers = {name: m for name, m in quantized_layers(model) if not m.frozen}
    bar = iter(show_progress(list(layers), "weight ranges"))
    for part in iterate_parts(model, layers):
        inside = {name: layer for name, layer in layers.items() if part.holds(name)}
        for name, layer in inside.items():
            next(bar)
            _compute_parameter_scales(name, layer)
        if config is not None:
            share_scales(inside, config, "weight")
    next(bar, None)


def calibrate_layers(layers: Mapping[str, FakeQuantizedLayer], config: Config) -> None:
    """Compute the scales of weights and biases of some layers, and merge those that layers share.

    Args:
        layers: Layers by name: all or none of those that share a scale.
        config: Configuration of the model.

    Raises:
        ValueError: A weight or bias has NaN or infinite values; the layer is named.
    """
    for name, layer in layers.items():
        _compute_parameter_scales(name, layer)
    share_scales(layers, config, "weight")


def _compute_parameter_scales(name: str, layer: FakeQuantizedLayer) -> None:
    for tensor, quantizer in layer.parameter_quantizers().items():
        compute_parameter_scale(f"{name}.{tensor}", getattr(layer, tensor), quantizer)


def compute_parameter_scale(name: str, value: torch.Tensor, quantizer: TensorQuantizer) -> None:
    """Compute the scale of a weight or bias.

    Raises:
        ValueError: It has NaN or infinite values; the message has its name.
    """
    quantizer.observer(value)
    try:
        quantizer.compute_scales(value)
        if not quantizer.scheme.fmt.scaled and not is_finite(value):
            raise FloatingPointError
    except FloatingPointError:
        raise ValueError(
            f"{name} has NaN or infinite values: the model is damaged, or it "
            "overflowed in half precision. Repair it, or exclude the layer."
        ) from None
    quantizer.observer.reset()  # ranges per group take as much memory as the scales


@torch.no_grad()
def calibrate_activations(model: nn.Module, dataloader: Iterable[Any]) -> None:
    """Run every batch through the model and compute the scales of static activations.

    Weights are not quantized meanwhile, so this costs a float forward pass and the statistics.

    Raises:
        ValueError: The data is empty, a layer saw no data, or a range is not finite.
    """
    static = dict(_static_activations(model))
    # Ranges that depend on the order of the data need all of it in every process.
    is_divided = all(can_combine(quantizer) for quantizer in static.values())
    with disabled_quantizers(model), nullcontext() if is_divided else alone():
        run_data(
            model,
            dataloader,
            "calibration",
            observe=partial(_observing, static.values()),
            observed={name for name, _ in static},
        )
    if is_divided:
        combine_observers({f"{name}.{tensor}": q for (name, tensor), q in static.items()})
    _compute_activation_scales(model, static)


@torch.no_grad()
def compute_scales_from_statistics(model: nn.Module, statistics: Statistics) -> None:
    """Compute the scales of static activations from statistics of the float model.

    Args:
        model: A prepared model.
        statistics: Statistics of the float model that passed ``check_ranges``.

    Raises:
        ValueError: A layer saw no data.
    """
    static, layers = dict(_static_activations(model)), dict(quantized_layers(model))
    for (name, tensor), quantizer in static.items():
        statistics.range_of(name, tensor).fill_observer(quantizer, layers[name].weight.device)
    _compute_activation_scales(model, static)


def _compute_activation_scales(
    model: nn.Module, static: dict[tuple[str, str], TensorQuantizer]
) -> None:
    """Compute the scales of static activations from the observed statistics.

    Raises:
        ValueError: A layer saw no data, or a range is not finite.
    """
    idle = _idle_experts(model, static)
    unobserved = sorted(
        {n for (n, t), q in static.items() if q.observer.is_empty and (n, t) not in idle}
    )
    if unobserved:
        names = ", ".join(unobserved[:5]) + (" …" if len(unobserved) > 5 else "")
        raise ValueError(
            f"No data reached {names}. Calibrate with data that uses these layers, or exclude them."
        )
    for (name, tensor), quantizer in static.items():
        if (name, tensor) in idle:
            continue
        try:
            quantizer.compute_scales()
        except FloatingPointError:
            raise ValueError(
                f"The {tensor.split('_')[0]} of {name} was NaN or infinite in calibration: check "
                "the data, or calibrate in a wider type than " + str(_dtype(model)) + "."
            ) from None
    for place, others in idle.items():
        widest = max(others, key=_width)
        for part in PARTS:
            value = getattr(widest, part)
            setattr(static[place], part, None if value is None else value.clone())
    if idle:
        logger.warning(
            "No data reached %d tensors of experts, such as %s: they take the widest range of the "
            "other experts of their layer. Calibrate with more data to give them their own range.",
            len(idle),
            ".".join(next(iter(idle))),
        )


def _width(quantizer: TensorQuantizer) -> float:
    """Return the largest scale, or the tensor scale if block scales are dynamic."""
    scale = quantizer.scale_2 if quantizer.scale is None else quantizer.scale
    assert scale is not None
    return float(scale.max())


def _idle_experts(
    model: nn.Module, static: dict[tuple[str, str], TensorQuantizer]
) -> dict[tuple[str, str], list[TensorQuantizer]]:
    """Return the tensors of experts that saw no data, each with the observed ones of its group."""
    idle: dict[tuple[str, str], list[TensorQuantizer]] = {}
    for names in corresponding_experts(model):
        for tensor in ("input_tensors", "output_tensors"):
            places = [(name, tensor) for name in names if (name, tensor) in static]
            seen = [static[place] for place in places if not static[place].observer.is_empty]
            if seen:
                idle |= {p: seen for p in places if static[p].observer.is_empty}
    return idle


def compute_weight_scales(layers: Mapping[str, FakeQuantizedLayer], config: Config) -> None:
    """Compute the scales of the weights of some layers, and merge those that layers share."""
    for layer in layers.values():
        quantizer = layer.weight_quantizer
        if quantizer is not None:
            quantizer.observer(layer.weight)
            quantizer.compute_scales(layer.weight)
            quantizer.observer.reset()
    share_scales(layers, config, "weight")


def share_activation_scales(model: nn.Module, config: Config) -> None:
    """Set the scales of activations that layers share to the largest of these scales.

    Modules of one parent that match a group of ``shared_scale_groups`` share the per-tensor scale
    of the input, as they do that of the weight. Modules that match the cache patterns share the
    scale of the output, which is at least ``min_kv_scale``. With ``sync_moe_expert_input_amax``,
    the experts of a layer share the scale of the input.
    """
    layers = dict(quantized_layers(model))
    share_scales(layers, config, "input_tensors")
    if config.sync_moe_expert_input_amax:
        for members in corresponding_experts(model):
            inputs = [layers[n].quantizers().get("input_tensors") for n in members if n in layers]
            _merge(inputs, [None] * len(inputs))
    cache = config.kv_cache_patterns
    for members in group_by_parent(layers, cache):
        quantizers = [layers[n].quantizers().get("output_tensors") for n in members]
        _merge(quantizers, [None] * len(quantizers))
        for quantizer in quantizers:
            if quantizer is not None and quantizer.scale is not None:
                quantizer.scale = quantizer.scale.clamp(min=config.min_kv_scale)


def share_scales(layers: Mapping[str, FakeQuantizedLayer], config: Config, tensor: str) -> None:
    """Set the scales of a tensor that layers share to the largest of these scales.

    Args:
        layers: Layers by name: all or none of those that share a scale.
        config: Configuration of the model.
        tensor: ``weight`` or ``input_tensors``.
    """
    for group in config.shared_scale_groups:
        for members in group_by_parent(layers, group):
            values = [getattr(layers[n], tensor, None) for n in members]
            _merge([layers[n].quantizers().get(tensor) for n in members], values)


def group_by_parent(names: Iterable[str], patterns: list[str]) -> list[list[str]]:
    """Group names by parent module, if they match patterns or end in them.

    Example: ``a.0.k_proj``, ``a.0.v_proj`` and ``a.1.k_proj`` under the patterns ``k_proj`` and
    ``v_proj`` are the groups [a.0.k_proj, a.0.v_proj] and [a.1.k_proj].
    """
    patterns = [*patterns, *(f"*.{pattern}" for pattern in patterns)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if matches(name, patterns):
            groups[name.rpartition(".")[0]].append(name)
    return list(groups.values())


def merged_scale(
    quantizers: Sequence[TensorQuantizer | QuantizedTensor | None],
) -> torch.Tensor | None:
    """Return the largest scale of quantizers that can share one; None if they cannot.

    Quantizers can share a scale if all have one and are symmetric, per tensor and of one format.
    """
    scales: list[torch.Tensor] = []
    schemes = set()
    for quantizer in quantizers:
        if quantizer is None or quantizer.scale is None:
            return None
        scales.append(quantizer.scale)
        schemes.add(quantizer.scheme)
    if any(s.qscheme is not QSchemeType.per_tensor or not s.symmetric for s in schemes):
        return None
    if len(schemes) != 1:
        return None
    return torch.stack([s.to(scales[0].device) for s in scales]).amax(0) if scales else None


def _merge(quantizers: list[TensorQuantizer | None], values: Sequence[torch.Tensor | None]) -> None:
    present = [q for q in quantizers if q is not None and q.scale_2 is not None]
    if present and len(present) == len(quantizers):
        if all(q.scheme == present[0].scheme and q.scheme.scale.two_level for q in present):
            largest = torch.stack([q.scale_2.cpu() for q in present]).amax(0)  # type: ignore[union-attr]
            for q, value in zip(present, values, strict=True):
                q.set_tensor_scale(largest.to(q.scale_2.device, copy=True), value)  # type: ignore[union-attr]
        return
    scale = merged_scale(quantizers)
    if scale is None:
        return
    for quantizer in quantizers:
        assert quantizer is not None and quantizer.scale is not None
        quantizer.scale = scale.to(quantizer.scale.device, copy=True)


def _static_activations(
    model: nn.Module,
) -> Iterator[tuple[tuple[str, str], TensorQuantizer]]:
    """Iterate over the quantizers of activations with static scales, by layer and tensor.

    Those that belong to no layer, on the edges of a graph, go by their own name and "values".
    """
    owned: set[TensorQuantizer] = set()
    for name, layer in quantized_layers(model):
        owned |= set(layer.quantizers().values())
        for tensor, quantizer in layer.quantizers().items():
            if tensor not in PARAMETERS and quantizer.needs_data:
                yield (name, tensor), quantizer
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and module not in owned and module.needs_data:
            yield (name, "values"), module


@contextmanager
def _observing(observers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Let quantizers observe while the context is open, and do nothing afterwards."""
    for quantizer in observers:
        quantizer.enabled = quantizer.is_observing = True
    try:
        yield
    finally:
        for quantizer in observers:
            quantizer.enabled = quantizer.is_observing = False


@contextmanager
def disabled_quantizers(model: nn.Module) -> Iterator[None]:
    """Disable all quantizers of a model, in evaluation mode."""
    modes = {module: module.training for module in model.modules()}
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.enabled = False
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for quantizer in quantizers:
            quantizer.enabled, quantizer.is_observing = True, False


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.float32)
