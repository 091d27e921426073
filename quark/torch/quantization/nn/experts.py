"""Mixture-of-experts layers: split stacked parameters into linear layers, and stack them again.

Transformers holds the weights of all experts of a layer in parameters of three dimensions, and
saves most architectures with one matrix per expert. ``split_experts`` makes an ``nn.Linear`` of
each matrix, under its saved name, so that experts are quantized, calibrated and stored like other
layers. Example::

    mlp.experts.gate_up_proj (8, 2 * 1408, 2048)    ->    mlp.experts.0.gate_proj (1408, 2048)
                                                          mlp.experts.0.up_proj   (1408, 2048)
                                                          mlp.experts.1.gate_proj …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.quantization.nn.grouped_experts import STACKS, GroupedExperts, is_grouped
from quark.torch.quantization.nn.layer import change_class
from quark.torch.quantization.nn.linear_experts import LinearExperts, Stack
from quark.torch.quantization.nn.routed_experts import RoutedExperts

# Name of a layer of experts -> the layer and its stacked parameters.
SplitExperts = dict[str, tuple[LinearExperts, dict[str, nn.Parameter | None]]]


def split_experts(model: nn.Module) -> SplitExperts:
    """Replace stacked parameters by linear layers for each expert, in place.

    The weights are views of the stacked parameters and take no memory.

    Returns:
        The layers and their stacked parameters, for ``stack_experts``.
    """
    split: SplitExperts = {}
    for name, stacks in stack_layouts(model).items():
        module: Any = model.get_submodule(name)
        parameters, kind = dict(module._parameters), type(module)
        if is_grouped(module):
            change_class(module, GroupedExperts)
            module.shapes = {key: weight.shape for key, weight in parameters.items()}
        else:
            change_class(module, RoutedExperts)
        assert isinstance(module, LinearExperts)
        module.float_class, module.stacks, module.token_counts = kind, stacks, {}
        _split(module)
        split[name] = module, parameters
    return split


def stack_layouts(model: nn.Module) -> dict[str, dict[str, Stack]]:
    """Return names of layers of stacked experts -> layouts of their parameters, by name."""
    layers = {name: module for name, module in model.named_modules() if is_stacked(module)}
    saved = _saved_parts(model, list(layers)) if layers else {}
    return {
        name: STACKS if is_grouped(module) else _declared_stacks(module, name, saved)
        for name, module in layers.items()
    }


def _declared_stacks(
    module: Any, name: str, saved: Mapping[str, tuple[str, ...]]
) -> dict[str, Stack]:
    """Return the layouts of stacked parameters, by what Transformers says of a layer.

    Args:
        module: The layer.
        name: Its name.
        saved: See ``_saved_parts``.
    """
    stacks = {}
    for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        parts = saved.get(f"{name}.{stack}")
        stacks[stack] = Stack(parts or (stack,), bool(module.is_transposed), bool(parts))
    return stacks


def stack_experts(split: SplitExperts, keep: Iterable[str] = ()) -> None:
    """Undo ``split_experts``, in place.

    Args:
        split: Result of ``split_experts``.
        keep: Names of layers that will be quantized. Their experts stay split.
    """
    # Example: the layer "mlp.experts.3.up_proj" keeps "mlp.experts" split.
    kept = {name.rpartition(".")[0].rpartition(".")[0] for name in keep}
    for name, (module, parameters) in split.items():
        if name in kept or not isinstance(module, LinearExperts):
            continue
        for index in range(module.num_experts):
            delattr(module, str(index))
        kind = module.float_class
        for attribute in ("stacks", "float_class", "token_counts", "shapes"):
            vars(module).pop(attribute, None)
        change_class(module, kind)
        module._parameters.update(parameters)


@contextmanager
def temporarily_split_experts(model: nn.Module) -> Iterator[SplitExperts]:
    """Split the experts of a model and stack them again at the end."""
    experts = split_experts(model)
    try:
        yield experts
    finally:
        stack_experts(experts)


def corresponding_experts(model: nn.Module) -> Iterator[list[str]]:
    """Iterate over groups of corresponding linear layers in the experts of a layer, as names.

    Example: all ``mlp.experts.*.up_proj`` of one layer are a group.
    """
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            for part in (part for stack in module.stacks.values() for part in stack.parts):
                yield [f"{name}.{expert}.{part}" for expert in range(module.num_experts)]


def _split(module: LinearExperts) -> None:
    parameters = dict(module._parameters)
    module._parameters.clear()
    members = {str(index): nn.Module() for index in range(module.num_experts)}
    for index, member in members.items():
        module.add_module(index, member)
    for name, stack in module.stacks.items():
        weight, bias = parameters[name], parameters.get(f"{name}_bias")
        assert weight is not None
        biases = {} if bias is None else dict(stack.split(bias))
        for place, matrix in stack.split(weight):
            expert, _, part = place.partition(".")
            members[expert].add_module(part, _linear(matrix, biases.get(place)))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear.__new__(nn.Linear)  # its constructor would draw values first
    nn.Module.__init__(layer)
    layer.out_features, layer.in_features = weight.shape
    for name, value in (("weight", weight), ("bias", bias)):
        made = None if value is None else nn.Parameter(value.detach(), value.requires_grad)
        layer.register_parameter(name, made)
    return layer


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is a layer of stacked experts that ``split_experts`` splits.

    Transformers sets attributes of most; see ``grouped_experts`` for others.
    """
    if "down_proj" not in module._parameters:  # nearly all modules
        return False
    if is_grouped(module):
        return True
    first = "gate_up_proj" if getattr(module, "has_gate", None) else "up_proj"
    expected = {first, "down_proj"}
    if getattr(module, "has_bias", False):
        expected |= {f"{name}_bias" for name in expected}
    return (
        hasattr(module, "has_gate")
        and hasattr(module, "is_transposed")
        and set(module._parameters) == expected
        and all(p is not None and p.dim() >= 2 for p in module._parameters.values())
        and not getattr(module, "_is_expert_parallel", False)
    )


def _saved_parts(model: nn.Module, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the linear layers that stacked parameters are saved as.

    Parameters that are saved stacked are left out. The names come from the patterns by which
    Transformers merges the tensors of a checkpoint.
    """
    if not hasattr(model, "save_pretrained"):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
    except ImportError:
        return {}
    saved: dict[str, tuple[str, ...]] = {}
    for converter in get_model_conversion_mapping(model):
        if not isinstance(converter, WeightConverter):
            continue
        how = [(type(op), getattr(op, "dim", None)) for op in converter.operations]
        if how not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            continue
        patterns = converter.source_patterns
        parts = tuple(p.replace("\\", "").removesuffix(".weight").split(".")[-1] for p in patterns)
        for name in names:
            renamed = [converter.rename_source_key(f"{name}.0.{part}.weight") for part in parts]
            targets = {target for target, _ in renamed}
            if [pattern for _, pattern in renamed] == patterns and len(targets) == 1:
                saved[targets.pop()] = parts
    return saved
