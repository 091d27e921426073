"""Run data through a prepared model and settle the ranges of its quantizers."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.batches import parts, progress, run_batch
from quark.torch.pipeline.statistics import Statistics
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.nn.experts import counterparts, counting
from quark.torch.quantization.nn.layer import PARAMETERS, QuantMixin
from quark.torch.quantization.nn.quantizer import PARTS, State, TensorQuantizer
from quark.torch.quantization.preparation import quantized_layers

logger = logging.getLogger(__name__)


def needs_data(layers: Iterable[Any]) -> bool:
    """Whether a configuration of these layers has ranges that only data can tell."""
    return any(
        name not in PARAMETERS and spec.needs_data
        for layer in layers
        for name, spec in layer.specs()
    )


def calibrate_parameters(model: nn.Module) -> None:
    """Settle the ranges of weights and biases.

    Raises:
        ValueError: A weight or bias has NaN or infinite values; the layer is named.
    """
    for name, layer in progress(list(quantized_layers(model)), "weight ranges"):
        if layer.frozen:
            continue  # an algorithm has settled it
        for tensor, quantizer in layer.parameter_quantizers().items():
            value = getattr(layer, tensor)
            quantizer.observer(value)
            try:
                quantizer.settle(value)
                if not quantizer.scheme.fmt.scaled:
                    _check_finite(value)
            except FloatingPointError:
                raise ValueError(
                    f"{name}.{tensor} has NaN or infinite values: the model is damaged, or it "
                    "overflowed in half precision. Repair it, or exclude the layer."
                ) from None
            quantizer.observer.reset()  # ranges per group would take as much as the scales


@torch.no_grad()
def calibrate_activations(model: nn.Module, dataloader: Iterable[Any]) -> None:
    """Run every batch through the model and settle the ranges of static activations.

    Weights pass unquantized meanwhile, so this costs a plain forward pass and its statistics.

    Raises:
        ValueError: There is no data, a layer saw none, or a range is not finite.
    """
    static = dict(_static_activations(model))
    batches = 0
    with observing(model, static.values()):
        for batch in parts(progress(dataloader, "calibration")):
            with counting(model, batches):
                run_batch(model, batch)
            batches += 1
    if not batches:
        raise ValueError("The dataloader is empty: static activation ranges need at least a batch.")
    _settle_activations(model, static, f" in {batches} batches")


@torch.no_grad()
def recall_activations(model: nn.Module, statistics: Statistics) -> None:
    """Settle the ranges of static activations by those of the float model.

    Args:
        model: A prepared model.
        statistics: Statistics of the float model, which tell the ranges (``check_ranges``).

    Raises:
        ValueError: A layer saw no data.
    """
    static, layers = dict(_static_activations(model)), dict(quantized_layers(model))
    for (name, tensor), quantizer in static.items():
        statistics.range_of(name, tensor).show(quantizer, layers[name].weight.device)
    _settle_activations(model, static, "")


def recall_tokens(model: nn.Module, statistics: Statistics) -> None:
    """Let layers of experts know how many tokens the data sends to each in the float model."""
    for names in counterparts(model):
        if all(name in statistics.readers for name in names):
            experts: Any = model.get_submodule(names[0].rsplit(".", 2)[0])
            experts.sent = {0: [int(statistics.tokens[statistics.first(n)]) for n in names]}


def _settle_activations(
    model: nn.Module, static: dict[tuple[str, str], TensorQuantizer], where: str
) -> None:
    """Settle the ranges of static activations that were observed.

    Raises:
        ValueError: A layer saw no data, or a range is not finite.
    """
    idle = _idle_experts(model, static)
    unseen = sorted(
        {n for (n, t), q in static.items() if q.observer.is_empty and (n, t) not in idle}
    )
    if unseen:
        raise ValueError(
            f"No data reached {', '.join(unseen[:5])}{' …' if len(unseen) > 5 else ''}{where}. "
            "Calibrate with data that uses these layers, or exclude them."
        )
    for (name, tensor), quantizer in static.items():
        if (name, tensor) in idle:
            continue
        try:
            quantizer.settle()
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
            "No data reached %d tensors of experts, such as %s: they take the widest range among "
            "the experts beside them. Calibrate with more data to give them their own.",
            len(idle),
            ".".join(next(iter(idle))),
        )


def _width(quantizer: TensorQuantizer) -> float:
    """Return how wide a settled range is: of blocks that are dynamic, that of the whole tensor."""
    scale = quantizer.scale_2 if quantizer.scale is None else quantizer.scale
    assert scale is not None
    return float(scale.max())


def _idle_experts(
    model: nn.Module, static: dict[tuple[str, str], TensorQuantizer]
) -> dict[tuple[str, str], list[TensorQuantizer]]:
    """Return the tensors of experts that saw no data, with those of their counterparts that did."""
    found: dict[tuple[str, str], list[TensorQuantizer]] = {}
    for names in counterparts(model):
        for tensor in ("input_tensors", "output_tensors"):
            places = [(name, tensor) for name in names if (name, tensor) in static]
            seen = [static[place] for place in places if not static[place].observer.is_empty]
            if seen:
                found |= {p: seen for p in places if static[p].observer.is_empty}
    return found


def settle_weights(layers: Mapping[str, QuantMixin], config: Config) -> None:
    """Settle the ranges of the weights of some layers, those that they share as well."""
    for layer in layers.values():
        quantizer = layer.weight_quantizer
        if quantizer is not None:
            quantizer.observer(layer.weight)
            quantizer.settle(layer.weight)
            quantizer.observer.reset()
    _share(layers, config, "weight")


def share_scales(model: nn.Module, config: Config) -> None:
    """Give layers that are served together the scale of the widest among them.

    Modules of one parent that match a group of ``shared_scale_groups`` share per-tensor scales of
    weight and input; those that match the cache patterns share that of the output, which is also
    kept from falling below ``min_kv_scale``. With ``sync_moe_expert_input_amax`` the experts of a
    layer share that of the input.
    """
    layers = dict(quantized_layers(model))
    _share({n: layer for n, layer in layers.items() if not layer.frozen}, config, "weight")
    _share(layers, config, "input_tensors")
    if config.sync_moe_expert_input_amax:
        for members in counterparts(model):
            inputs = [layers[n].quantizers().get("input_tensors") for n in members if n in layers]
            _merge(inputs, [None] * len(inputs))
    cache = config.kv_cache_patterns
    for members in siblings(layers, cache):
        quantizers = [layers[n].quantizers().get("output_tensors") for n in members]
        _merge(quantizers, [None] * len(quantizers))
        for quantizer in quantizers:
            if quantizer is not None and quantizer.scale is not None:
                quantizer.scale = quantizer.scale.clamp(min=config.min_kv_scale)


def _share(layers: Mapping[str, QuantMixin], config: Config, tensor: str) -> None:
    for group in config.shared_scale_groups:
        for members in siblings(layers, group):
            values = [getattr(layers[n], tensor, None) for n in members]
            _merge([layers[n].quantizers().get(tensor) for n in members], values)


def siblings(names: Iterable[str], patterns: list[str]) -> list[list[str]]:
    """Group the names that match patterns, or end in them, by their parent module."""
    patterns = [*patterns, *(f"*.{pattern}" for pattern in patterns)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        if matches(name, patterns):
            groups[name.rpartition(".")[0]].append(name)
    return list(groups.values())


def merged_scale(
    quantizers: Sequence[TensorQuantizer | State | None],
) -> torch.Tensor | None:
    """Return the largest scale of quantizers that can share one, or None if they cannot.

    They can if all are settled, symmetric, per tensor, and of one format.
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


def _check_finite(x: torch.Tensor) -> None:
    if x.numel() and not bool(torch.isfinite(torch.stack(x.detach().aminmax())).all()):
        raise FloatingPointError


def _merge(quantizers: list[TensorQuantizer | None], values: Sequence[torch.Tensor | None]) -> None:
    present = [q for q in quantizers if q is not None and q.scale_2 is not None]
    if present and len(present) == len(quantizers):
        if all(q.scheme == present[0].scheme and q.scheme.scale.two_level for q in present):
            largest = torch.stack([q.scale_2.cpu() for q in present]).amax(0)  # type: ignore[union-attr]
            for q, value in zip(present, values, strict=True):
                q.resettle(largest.to(q.scale_2.device, copy=True), value)  # type: ignore[union-attr]
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
    for name, layer in quantized_layers(model):
        for tensor, quantizer in layer.quantizers().items():
            if tensor not in PARAMETERS and quantizer.needs_data:
                yield (name, tensor), quantizer


@contextmanager
def observing(model: nn.Module, observers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Switch the given quantizers to observing, all others off, and the model to evaluation."""
    modes = {module: module.training for module in model.modules()}
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    for quantizer in quantizers:
        quantizer.enabled = False
    for quantizer in observers:
        quantizer.enabled = quantizer.observing = True
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for quantizer in quantizers:
            quantizer.enabled, quantizer.observing = True, False


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters()), torch.float32)
