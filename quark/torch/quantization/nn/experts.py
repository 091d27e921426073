"""Mixture-of-experts layers: experts that share stacked parameters become linear layers.

Transformers keeps the weights of all experts of a layer in parameters of three dimensions and
saves most architectures with a matrix per expert. Here each such matrix becomes an ``nn.Linear``
under its saved name, so that experts are quantized, calibrated and stored like any other layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.quantization.nn.layer import become


class Stack(NamedTuple):
    """A stacked parameter: which linear layers of each expert it holds, and how.

    Attributes:
        parts: Names of the linear layers that its output rows belong to, in order.
        is_transposed: Whether its shape is (experts, in, out) instead of (experts, out, in).
        is_merged: Whether Transformers saves its matrices one by one and merges them on loading.
    """

    parts: tuple[str, ...]
    is_transposed: bool
    is_merged: bool

    def split(self, stacked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name below the layer of experts, view) of each matrix, or of each bias."""
        turned = stacked.transpose(1, 2) if stacked.dim() == 3 and self.is_transposed else stacked
        shares = turned.chunk(len(self.parts), 1)
        matrices = [matrix for share in shares for matrix in share.unbind(0)]
        return list(zip(self.places(len(stacked)), matrices, strict=True))

    def places(self, experts: int) -> list[str]:
        """Return the names of the linear layers below the layer of experts, part by part."""
        return [f"{expert}.{part}" for part in self.parts for expert in range(experts)]


class LinearExperts(nn.Module):
    """A layer of experts whose weights are linear layers: child ``3.up_proj`` and so on.

    Takes the place of a layer with stacked parameters and keeps its gate and activation.

    Attributes:
        stacks: How stacked parameters map to the linear layers, by their names.
        float_class: Class with the stacked parameters.
        sent: Tokens sent to each expert, by batch of calibration; see ``counting``.
    """

    stacks: dict[str, Stack]
    float_class: Any
    num_experts: int
    has_gate: bool
    has_post_expert_norm: bool
    act_fn: Any
    post_expert_norm: Any
    sent: dict[int, list[int]]
    _calls: list[list[int]] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send tokens through their experts and add up what these return.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: Expert of each of the (tokens, k); those from ``num_experts`` on give 0.
            top_k_weights: Factor of each of the (tokens, k).
        """
        width = top_k_index.shape[-1]
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        if self._calls is not None:
            self._calls.append(counts[: self.num_experts])
        rows = torch.split(hidden_states[order // width], counts)
        found = [
            self._expert(e, x) if len(x) and e < self.num_experts else torch.zeros_like(x)
            for e, x in enumerate(rows)
        ]
        outputs = torch.cat(found) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        placed = torch.empty_like(outputs)
        placed[order] = outputs
        summed = placed.view(*top_k_index.shape, hidden_states.shape[-1]).sum(-2)
        return summed.to(hidden_states.dtype)

    @property
    def tokens(self) -> list[int] | None:
        """Tokens that calibration sent to each expert, None without data."""
        found = [sum(n) for n in zip(*self.sent.values(), strict=True)]
        return found or None

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        into, out = self.stacks.values()
        expert: Any = self._modules[str(index)]
        raised = torch.cat([getattr(expert, part)(x) for part in into.parts], -1)
        raised = (
            self.float_class._apply_gate(self, raised) if self.has_gate else self.act_fn(raised)
        )
        y: torch.Tensor = getattr(expert, out.parts[0])(raised)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def expect_stacked(self) -> None:
        """Declare the weights that a loader merges in their merged form, which it will assign.

        Transformers merges what a checkpoint stores for each expert, whatever its shape and type,
        and assigns the whole: the linear layers then hold views of it.

        Raises:
            ValueError: The matrices of one purpose differ in shape or type.
        """
        for name, stack in self.stacks.items():
            if not stack.is_merged:
                continue
            layers: list[Any] = [self.get_submodule(p) for p in stack.places(self.num_experts)]
            kinds = {(layer.weight.shape, layer.weight.dtype) for layer in layers}
            if len(kinds) != 1:
                raise ValueError(
                    f"The experts hold {name} in different formats, which Transformers cannot "
                    "merge: load the checkpoint with ModelImporter, or quantize them alike."
                )
            weight = layers[0].weight
            shape = (self.num_experts, weight.shape[0] * len(stack.parts), *weight.shape[1:])
            for layer in layers:
                layer._parameters["weight"] = None
            empty = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def __setattr__(self, name: str, value: Any) -> None:
        """Hand a merged parameter that is assigned to the linear layers it holds."""
        if name not in self._parameters:
            super().__setattr__(name, value)
            return
        del self._parameters[name]
        for place, matrix in self.stacks[name]._replace(is_transposed=False).split(value):
            made = nn.Parameter(matrix.detach(), requires_grad=value.requires_grad)
            vars(made).update(vars(value))  # marks of the loader
            self.get_submodule(place)._parameters["weight"] = made

    def extra_repr(self) -> str:
        """Return the number of experts."""
        return f"{self.num_experts} experts"


@contextmanager
def counting(module: nn.Module, batch: int) -> Iterator[None]:
    """Note how many tokens of a batch are sent to each expert in a module.

    A batch that comes again replaces what it gave before, if it reaches the experts.
    """
    found = [m for m in module.modules() if isinstance(m, LinearExperts)]
    for experts in found:
        experts._calls = []
    try:
        yield
    finally:
        for experts in found:
            if experts._calls:
                experts.sent[batch] = [sum(n) for n in zip(*experts._calls, strict=True)]
            del experts._calls


# Name of a layer of experts -> the layer and the stacked parameters it had.
Unfused = dict[str, tuple[LinearExperts, dict[str, nn.Parameter | None]]]


def unfuse(model: nn.Module) -> Unfused:
    """Give every expert linear layers of its own, in place.

    Weights become views of the stacked parameters, which costs no memory.

    Returns:
        What ``fuse`` needs to undo it.
    """
    found = {name: module for name, module in model.named_modules() if is_stacked(module)}
    saved = _saved_parts(model, list(found)) if found else {}
    done: Unfused = {}
    for name, module in found.items():
        parameters, kind = dict(module._parameters), type(module)
        stacks = {}
        for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            parts = saved.get(f"{name}.{stack}")
            stacks[stack] = Stack(parts or (stack,), bool(module.is_transposed), bool(parts))
        become(module, LinearExperts)
        assert isinstance(module, LinearExperts)
        module.float_class, module.stacks, module.sent = kind, stacks, {}
        _split(module)
        done[name] = module, parameters
    return done


def fuse(unfused: Unfused, keep: Iterable[str] = ()) -> None:
    """Undo ``unfuse``, in place.

    Args:
        unfused: What ``unfuse`` returned.
        keep: Names of layers that will be quantized: experts they belong to are left as they are.
    """
    for name, (module, parameters) in unfused.items():
        is_kept = any(layer.startswith(f"{name}.") for layer in keep)
        if is_kept or not isinstance(module, LinearExperts):
            continue
        for index in range(module.num_experts):
            delattr(module, str(index))
        kind = module.float_class
        del module.stacks, module.float_class, module.sent
        become(module, kind)
        module._parameters.update(parameters)


def counterparts(model: nn.Module) -> Iterator[list[str]]:
    """Iterate over the names of the linear layers with one purpose in the experts of a layer."""
    for name, module in model.named_modules():
        if isinstance(module, LinearExperts):
            for part in (part for stack in module.stacks.values() for part in stack.parts):
                yield [f"{name}.{expert}.{part}" for expert in range(module.num_experts)]


def _split(module: LinearExperts) -> None:
    parameters = dict(module._parameters)
    module._parameters.clear()
    for index in range(module.num_experts):
        module.add_module(str(index), nn.Module())
    for name, stack in module.stacks.items():
        weight, bias = parameters[name], parameters.get(f"{name}_bias")
        assert weight is not None
        biases = {} if bias is None else dict(stack.split(bias))
        for place, matrix in stack.split(weight):
            expert, _, part = place.partition(".")
            module.get_submodule(expert).add_module(part, _linear(matrix, biases.get(place)))


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return made


def is_stacked(module: nn.Module) -> bool:
    """Whether a module declares itself a layer of experts, as those of Transformers do."""
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
    """Return the linear layers that each stacked parameter is saved as, where it is not as it is.

    Transformers knows them as the patterns of what it fuses when it loads a model.
    """
    if not hasattr(model, "save_pretrained"):
        return {}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
    except ImportError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
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
                found[targets.pop()] = parts
    return found
