"""Groups, super-blocks and rotations that divide the inputs of the layers of a model."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quark.torch.quantization.config.algo import RotationConfig
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES, fallback_of
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import assign, literal
from quark.torch.quantization.config.resolution import resolve_names
from quark.torch.quantization.model_shape import name_of_kind
from quark.torch.quantization.nn.experts import temporarily_split_experts
from quark.torch.quantization.nn.layer import QuantizedLayer, float_class, input_axis
from quark.torch.quantization.nn.operators import is_operator_module
from quark.torch.quantization.preparation import find_undivided_axis

_POWERS = (256, 128, 64, 32)  # group sizes that other software reads
_SMALLEST = 8  # elements of a group

Shape = tuple[type[nn.Module], tuple[int, ...]]


def fit_group_sizes(model: nn.Module, config: Config) -> tuple[Config, dict[str, int]]:
    """Return a configuration whose groups divide the weights of a model.

    Where a group size does not divide the inputs of a layer, another takes its place, in all layers
    of that name but for numbers: the largest of 128, 64 and 32 below it that divides them; else the
    largest of all sizes between it and 8; else the smallest above it, at most all inputs. Inputs
    that have the groups of the weight get the new size too.

    Example: of a model with 576 hidden values and 1536 in its MLPs, groups of 128 become groups of
    64 in ``model.layers.*.self_attn.q_proj`` and others, but stay in the layers that read the MLP.
    Inputs of 72 and 100 values are one group.

    Args:
        model: The model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.

    Returns:
        The configuration, and the new group size of each kind of layers that has one, by name
        pattern.
    """
    config, fitted = _fit(model, config, _with_fitting_size)
    weights = {pattern: layer.weight for pattern, layer in fitted.items()}
    return config, {n: spec.group_size for n, spec in weights.items() if spec and spec.group_size}


def common_group_size(model: nn.Module, config: Config) -> int | None:
    """Return a smaller group size that divides all weights with groups: 128, 64, 32, 16 or 8.

    Args:
        model: The model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.

    Returns:
        The largest of these sizes, or None if none divides all.
    """
    layers, shapes = _quantized_layers(model, config)
    weights = {name: layer.weight for name, layer in layers.items() if layer.weight is not None}
    given = {name: spec.group_size for name, spec in weights.items() if spec.group_size}
    grouped = {(id(layers[name]), shapes[name]): name for name in given}
    for size in (128, 64, 32, 16, 8):
        resized = {key: _with_group_size(layers[name], size) for key, name in grouped.items()}
        are_divided = (_divides(layer, [key[1]]) for key, layer in resized.items() if key[1])
        if size < max(given.values()) and all(are_divided):
            return size
    return None


def fit_super_blocks(model: nn.Module, config: Config) -> tuple[Config, dict[str, str]]:
    """Return a configuration whose super-blocks divide the weights of a model.

    Layers that super-blocks do not divide take another scheme, in blocks of 32 inputs, as in
    llama.cpp. Example: of a model with 576 hidden values and 1536 in its MLPs, q4_k becomes q5_0 in
    the layers that read hidden values, but stays in those that read the MLP.

    Args:
        model: The model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.

    Returns:
        The configuration, and the scheme of each kind of layers that takes another one, by name
        pattern.
    """
    names: dict[str, str] = {}

    def replacement(
        layer: QuantizationConfig, shapes: Iterable[Shape]
    ) -> QuantizationConfig | None:
        name = "" if layer.weight is None else fallback_of(layer.weight)
        if not name or all(_has_whole_super_blocks(layer, *shape) for shape in shapes):
            return None
        return replace(layer, weight=BLOCK_SCHEMES[name].spec())

    config, fitted = _fit(model, config, replacement)
    for pattern, layer in fitted.items():
        kinds = (n for n, kind in BLOCK_SCHEMES.items() if layer.weight and kind.fits(layer.weight))
        names[pattern] = next(kinds)
    return config, names


def fit_rotation_size(model: nn.Module, config: Config) -> tuple[Config, int | None]:
    """Return a configuration with rotations that divide the inputs of a model.

    Where ``rotation_size`` does not divide the inputs of all linear layers that are quantized, the
    largest power of two that divides both takes its place, if there is one. Example: 32 becomes 16
    for a model with 48 hidden values and 96 in its MLPs.

    Args:
        model: The model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.

    Returns:
        The configuration, and the new size, or None if nothing changed.
    """
    algorithms = config.algo_config or []
    rotation = next((a for a in algorithms if isinstance(a, RotationConfig)), None)
    if rotation is None or rotation.rotation_size is None:
        return config, None
    shapes = filter(None, _quantized_layers(model, config)[1].values())
    common = math.gcd(*(shape[input_axis(kind)] for kind, shape in shapes if len(shape) == 2))
    size = math.gcd(rotation.rotation_size, common & -common)
    if common % rotation.rotation_size == 0 or size == 1:
        return config, None
    fitted = [replace(a, rotation_size=size) if a is rotation else a for a in algorithms]
    return replace(config, algo_config=fitted), size


def _fit(
    model: nn.Module,
    config: Config,
    replacement: Callable[[QuantizationConfig, Iterable[Shape]], QuantizationConfig | None],
) -> tuple[Config, dict[str, QuantizationConfig]]:
    """Return a configuration with another one for some kinds of layers, and these by name pattern.

    Args:
        model: The model.
        config: How it will be quantized.
        replacement: Returns the configuration for layers of some shapes, or None to leave theirs.
    """
    layers, shapes = _quantized_layers(model, config)
    fitted: dict[str, QuantizationConfig] = {}
    for pattern, names in _group(layers).items():
        layer = layers[names[0]]
        other = replacement(layer, {shape for n in names if (shape := shapes[n]) is not None})
        if other is not None:
            fitted[pattern] = other
    if not fitted:
        return config, {}
    # The longest patterns come first: the "*" of a shorter one may match several parts of a name.
    first = {pattern: fitted[pattern] for pattern in sorted(fitted, key=len, reverse=True)}
    return replace(config, layer_quant_config={**first, **config.layer_quant_config}), fitted


def _quantized_layers(
    model: nn.Module, config: Config
) -> tuple[dict[str, QuantizationConfig], dict[str, Shape | None]]:
    """Return how each layer is quantized, and its shape, by name."""
    with temporarily_split_experts(model):
        modules = dict(model.named_modules())
        operators = {
            name: float_class(module) if isinstance(module, QuantizedLayer) else type(module)
            for name, module in modules.items()
            if isinstance(module, QuantizedLayer) or is_operator_module(module)
        }
        layers = assign(operators, resolve_names(config, model))
        return layers, {name: _shape_of(modules[name]) for name in layers}


def _shape_of(module: Any) -> Shape | None:
    """Return the type and the shape of the weight of a layer, or None if it has no weight."""
    if isinstance(module, QuantizedLayer):
        return module.float_class, module.shape("weight")
    weight = getattr(module, "weight", None)
    return None if weight is None else (type(module), tuple(weight.shape))


def _group(layers: Mapping[str, QuantizationConfig]) -> dict[str, list[str]]:
    """Return a pattern -> the layers that it stands for, which are quantized alike."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in layers:
        kinds[name_of_kind(name)].append(name)
    groups: dict[str, list[str]] = {}
    for kind, names in kinds.items():
        is_uniform = all(layers[name] == layers[names[0]] for name in names)
        groups |= {kind: names} if is_uniform else {literal(name): [name] for name in names}
    return groups


def _with_fitting_size(
    layer: QuantizationConfig, shapes: Iterable[Shape]
) -> QuantizationConfig | None:
    """Return a layer with groups that divide weights; None if none are needed, or none do."""
    size = None if layer.weight is None else layer.weight.group_size
    if size is None or _divides(layer, shapes):
        return None
    largest = max(shape[input_axis(kind)] for kind, shape in shapes)
    powers = (power for power in _POWERS if power < size)
    smallest = min(_SMALLEST, largest)
    candidates = (*powers, *range(size - 1, smallest - 1, -1), *range(size + 1, largest + 1))
    resized = (_with_group_size(layer, candidate) for candidate in candidates)
    return next((other for other in resized if _divides(other, shapes)), None)


def _has_whole_super_blocks(
    layer: QuantizationConfig, kind: type[nn.Module], shape: tuple[int, ...]
) -> bool:
    """Whether super-blocks divide the rows of a weight; others than of matrices have none."""
    assert layer.weight is not None
    scheme = layer.weight.scheme
    return len(shape) != 2 or shape[-1] % (scheme.group * scheme.scale.span) == 0


def _divides(layer: QuantizationConfig, shapes: Iterable[Shape]) -> bool:
    assert layer.weight is not None
    return all(find_undivided_axis(layer.weight, *shape) is None for shape in shapes)


def _with_group_size(layer: QuantizationConfig, size: int) -> QuantizationConfig:
    weight, inputs = layer.weight, layer.input_tensors
    assert weight is not None
    if inputs is not None and inputs.group_size == weight.group_size:
        inputs = replace(inputs, group_size=size)
    return replace(layer, weight=replace(weight, group_size=size), input_tensors=inputs)
