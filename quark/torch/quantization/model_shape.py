"""Shapes of a model as a configuration quantizes it, and its layers by kind, without values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from quark.torch.pipeline.shapes import BlockShape, DataShape, LayerShape, ModelShape
from quark.torch.pipeline.unit_cache import Unit, find_units
from quark.torch.quantization.calibration import group_by_parent
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.layer_types import NAMED_ONLY
from quark.torch.quantization.config.match import matches
from quark.torch.quantization.config.parts import find_parts
from quark.torch.quantization.config.resolution import (
    fused_projections,
    output_head,
    resolve_names,
)
from quark.torch.quantization.nn.experts import (
    corresponding_experts,
    stack_experts,
    temporarily_split_experts,
)
from quark.torch.quantization.nn.layer import input_axis
from quark.torch.quantization.nn.operators import (
    has_empty_weight,
    is_operator,
    is_operator_module,
)
from quark.torch.quantization.preparation import select_layers

Layers = Mapping[str, QuantizationConfig]


class LayerKind(NamedTuple):
    """Layers of one name but for numbers, of one shape, that are quantized alike.

    Attributes:
        name: The name, with ``*`` for numbers.
        number: How many there are.
        shape: Shape of the weight.
        config: How they are quantized; None for layers in float.
        reason: Why they stay in float, or are not quantized anew; empty for others.
        is_kept: Whether they keep the codes of a quantized source.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    config: QuantizationConfig | None
    reason: str
    is_kept: bool = False


@contextmanager
def selected(model: nn.Module, config: Config) -> Iterator[tuple[Config, Layers]]:
    """Open the configuration with the names of a model, and that of each layer, experts split.

    Experts that the configuration quantizes are split meanwhile, others are stacked.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    with temporarily_split_experts(model) as experts:
        resolved = resolve_names(config, model)
        layers = select_layers(model, resolved, warns=False)
        stack_experts(experts, keep=layers)
        yield resolved, layers


def measure_model(model: nn.Module, config: Config) -> ModelShape:
    """Return the shapes of a model and of the layers that a configuration quantizes.

    Args:
        model: The float model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    with selected(model, config) as (_, layers):
        return measure_selected(model, layers)


def measure_selected(model: nn.Module, layers: Layers) -> ModelShape:
    """Return the shapes of a model and of layers that ``selected`` has chosen, inside of it.

    Layers share an input if their names are those of projections that models fuse, and they round
    it alike; others read inputs of their own, which is the larger estimate.
    """
    inputs = _first_readers(layers)
    shares = _expert_shares(model)
    modules = dict(model.named_modules())
    shapes = {n: _shape_of(modules[n], inputs.get(n, n), shares.get(n, 1.0)) for n in layers}
    units = find_units(model)
    blocks = [unit for unit in units if _is_block(model, unit)]
    layers_of = _divide([unit.name for unit in blocks], shapes)
    inside = tuple(f"{unit.name}." for unit in blocks)
    outside = {
        id(p): p.numel()
        for name, p in model.named_parameters()
        if p.dim() > 1 and not name.startswith(inside)
    }
    return ModelShape(
        size=_size(model.parameters()) + _size(model.buffers()),
        largest_unit=max(_size(p for _, p in unit.parameters()) for unit in units),
        blocks=tuple(_block_shape(u, layers_of[u.name], shares) for u in blocks),
        around=sum(outside.values()),
        around_largest=max(outside.values(), default=0),
        quantized_around=layers_of[""],
    )


def _first_readers(layers: Layers) -> dict[str, str]:
    """Map each layer of fused projections to the first of them that rounds its inputs alike."""
    first: dict[str, str] = {}
    for group in fused_projections():
        for members in group_by_parent(layers, group):
            for name in members:
                spec = layers[name].input_tensors
                first[name] = next(m for m in members if layers[m].input_tensors == spec)
    return first


def describe_data(model: nn.Module, tokens: int, batch: int, length: int, blocks: int) -> DataShape:
    """Return the tensors that data becomes in a model.

    Args:
        model: The model; its parameters need no values.
        tokens: Number of tokens.
        batch: Tokens of a chunk, which run at once.
        length: Tokens of a sequence.
        blocks: Number of blocks.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    hidden, labels = (getattr(text, name, 0) or 0 for name in ("hidden_size", "vocab_size"))
    itemsize = next(model.parameters()).itemsize
    return DataShape(tokens, batch, length, hidden, itemsize, labels, blocks)


def name_of_kind(name: str) -> str:
    """Return the name of a module with ``*`` for numbers: ``layers.0.fc`` -> ``layers.*.fc``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def list_kinds(model: nn.Module, config: Config, kept: Layers | None = None) -> list[LayerKind]:
    """Return the layers of a model by kind, those that are quantized first.

    Args:
        model: The float model; its parameters need no values. It is unchanged afterwards.
        config: How it will be quantized.
        kept: Layers that keep the codes of a quantized source, if they are not quantized anew.

    Raises:
        ValueError: The configuration does not fit the model.
    """
    with selected(model, config) as (_, layers):
        return list_selected(model, config, layers, kept)


def list_selected(
    model: nn.Module, config: Config, layers: Layers, kept: Layers | None = None
) -> list[LayerKind]:
    """Return the layers of a model by kind, as ``list_kinds`` does, inside of ``selected``."""
    reasons = _Reasons(model, config)
    counts: dict[tuple[Any, ...], int] = {}
    configs: dict[tuple[Any, ...], QuantizationConfig | None] = {}
    texts: dict[int, str] = {}  # of configurations, which many layers share
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if not own:
            continue
        layer = layers.get(name)
        reason = "" if layer is not None else reasons.of(name, module)
        is_kept = layer is None and name in (kept or {})
        layer = (kept or {})[name] if is_kept else layer
        shape = tuple(getattr(module, "weight", own[0]).shape)
        if id(layer) not in texts:
            texts[id(layer)] = repr(layer)
        key = name_of_kind(name), shape, texts[id(layer)], reason, is_kept
        counts[key] = counts.get(key, 0) + 1
        configs[key] = layer
    kinds = [LayerKind(k[0], n, k[1], configs[k], *k[3:]) for k, n in counts.items()]
    return sorted(kinds, key=lambda kind: kind.config is None)


class _Reasons:
    """Why modules stay in float."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self._config = config
        self._parts = [part for part in find_parts(model) if part.kind in config.float_parts]
        self._heads = output_head(model)

    def of(self, name: str, module: nn.Module) -> str:
        """Return the reason for a module that is not quantized."""
        if not is_operator(type(module)):
            return f"{type(module).__name__} cannot be quantized"
        if has_empty_weight(module):
            return "weight has no elements"
        if not is_operator_module(module):
            return "weight is computed by a hook"
        for part in self._parts:
            if part.holds(name):
                return part.title
        for pattern in self._config.exclude:
            if matches(name, [pattern]):
                return f"excluded by {pattern}"
        if name in self._heads:
            return "output head"
        if type(module) in NAMED_ONLY:
            return "quantized only by name"
        return "no configuration for it"


def _expert_shares(model: nn.Module) -> dict[str, float]:
    """Return the part of the tokens that reaches each layer of an expert, if they are even."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    chosen = getattr(text, "num_experts_per_tok", None)
    return {
        name: min(1.0, chosen / len(names)) if isinstance(chosen, int) else 1.0
        for names in corresponding_experts(model)
        for name in names
    }


def _shape_of(module: Any, shared_input: str, share: float) -> LayerShape:
    weight = module.weight
    inputs = weight.shape[input_axis(type(module))] * (
        weight[0, 0].numel() if weight.dim() > 2 else 1
    )
    return LayerShape(weight.numel() // inputs, inputs, shared_input, share, weight.itemsize)


def _is_block(model: nn.Module, unit: Unit) -> bool:
    parent = unit.name.rpartition(".")[0]
    return unit.is_whole and isinstance(model.get_submodule(parent), nn.ModuleList)


def _divide(
    blocks: Iterable[str], shapes: Mapping[str, LayerShape]
) -> dict[str, tuple[LayerShape, ...]]:
    """Return the layers of each block by its name, and under "" those of none."""
    layers_of: dict[str, list[LayerShape]] = {"": [], **{name: [] for name in blocks}}
    for name, shape in shapes.items():
        owner = name
        while owner not in layers_of:
            owner = owner.rpartition(".")[0]
        layers_of[owner].append(shape)
    return {name: tuple(layers) for name, layers in layers_of.items()}


def _block_shape(
    unit: Unit, layers: tuple[LayerShape, ...], shares: Mapping[str, float]
) -> BlockShape:
    active = sum(
        p.numel() * shares.get(name.rpartition(".")[0], 1.0)
        for name, p in unit.parameters()
        if p.dim() > 1
    )
    return BlockShape(_size(p for _, p in unit.parameters()), active, layers)


def _size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
