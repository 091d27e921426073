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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from quark.torch.quantization.nn.layer import change_class
from quark.torch.quantization.nn.padding import mask_of, padding


class Stack(NamedTuple):
    """Layout of a stacked parameter: the linear layers of each expert that it holds.

    Attributes:
        parts: Names of the linear layers that the output rows belong to, in order.
        is_transposed: Whether the shape is (experts, in, out) instead of (experts, out, in).
        is_merged: Whether Transformers saves the matrices separately and merges them on loading.
    """

    parts: tuple[str, ...]
    is_transposed: bool
    is_merged: bool

    def split(self, stacked: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name below the layer of experts, view) of each matrix or bias."""
        is_matrix = stacked.dim() == 3  # (experts, out, in); a bias is (experts, out)
        rows_first = stacked.transpose(1, 2) if is_matrix and self.is_transposed else stacked
        parts = rows_first.chunk(len(self.parts), 1)
        matrices = [matrix for part in parts for matrix in part.unbind(0)]
        return list(zip(self.layer_names(len(stacked)), matrices, strict=True))

    def layer_names(self, experts: int) -> list[str]:
        """Return the names of the linear layers below the layer of experts, part by part.

        Example for two experts: ``0.gate_proj``, ``1.gate_proj``, ``0.up_proj``, ``1.up_proj``.
        """
        return [f"{expert}.{part}" for part in self.parts for expert in range(experts)]


class LinearExperts(nn.Module):
    """A layer of experts whose weights are linear layers: child ``3.up_proj`` and so on.

    It replaces a layer with stacked parameters and keeps its gate and activation.

    Attributes:
        stacks: Layout of each stacked parameter, by its name.
        float_class: Class with the stacked parameters.
        token_counts: Tokens of each calibration batch sent to each expert; see ``expert_tokens``.
        observes_all: Whether each expert runs on all tokens of calibration data where its inputs
            are observed. The outputs of the layer are those of the experts that the router chose.
    """

    stacks: dict[str, Stack]
    float_class: Any
    num_experts: int
    has_gate: bool
    has_post_expert_norm = False
    act_fn: Any
    post_expert_norm: Any
    token_counts: dict[int, list[int]]
    observes_all = False
    _calls: list[list[int]] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of the experts of each token.

        Args:
            hidden_states: (tokens, hidden).
            top_k_index: (tokens, k) experts; the output of ``num_experts`` and above is 0.
            top_k_weights: (tokens, k) factors of the outputs.
        """
        if torch.compiler.is_compiling():
            placed = self._traced_outputs(hidden_states, top_k_index)
            return self._weighted_sum(placed, top_k_weights, hidden_states.dtype)
        # Sort the (token, choice) pairs by expert, so that each expert runs once on its tokens.
        # Example, k = 2 and the choices [[1, 0], [0, 2]]: order = [1, 2, 0, 3], the tokens
        # order // 2 = [0, 1, 0, 1], of which experts 0, 1, 2 take 2, 1 and 1.
        width = top_k_index.shape[-1]
        order = top_k_index.reshape(-1).argsort(stable=True)
        counts = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts).tolist()
        rows = torch.split(hidden_states[order // width], counts)
        mask = mask_of(hidden_states)  # (tokens,)
        sent = torch.ones_like(order, dtype=torch.bool) if mask is None else mask[order // width]
        masks = torch.split(sent, counts)
        if self._calls is not None:
            received = [int(kept.sum()) for kept in masks][: self.num_experts]
            if self.observes_all:
                received = [len(hidden_states) if mask is None else int(mask.sum())] * len(received)
                self._observe_others(hidden_states, top_k_index, mask)
            self._calls.append(received)
        results = []
        for expert, (x, kept) in enumerate(zip(rows, masks, strict=True)):
            with padding(None if mask is None else kept):
                is_used = len(x) and expert < self.num_experts
                results.append(self._expert(expert, x) if is_used else torch.zeros_like(x))
        outputs = torch.cat(results)
        placed = torch.empty_like(outputs)
        placed[order] = outputs
        return self._weighted_sum(placed, top_k_weights, hidden_states.dtype)

    @torch.no_grad()
    def _observe_others(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """Run each observed expert on the tokens that the router sends to others.

        Nothing reads the outputs, so those of the layer keep their bits.
        """
        for expert in range(self.num_experts):
            others = (top_k_index != expert).all(-1)
            if bool(others.any()) and self._is_observed(expert):
                with padding(None if mask is None else mask[others]):
                    self._expert(expert, hidden_states[others])

    def _is_observed(self, expert: int) -> bool:
        """Whether a hook or a quantizer observes the inputs of a layer of an expert."""
        modules = self.get_submodule(str(expert)).modules()
        return any(m._forward_pre_hooks or getattr(m, "is_observing", False) for m in modules)

    def _weighted_sum(
        self, outputs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return (tokens, hidden) from outputs (tokens * k, hidden) and weights (tokens, k)."""
        products = outputs * weights.reshape(-1, 1)
        return products.view(*weights.shape, outputs.shape[-1]).sum(-2).to(dtype)

    def _traced_outputs(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of each (token, choice) pair, (tokens * k, hidden), for a graph.

        A graph has one path for all inputs. So every expert runs, on its tokens in their order, as
        in ``forward``; there may be none.
        """
        width, chosen = top_k_index.shape[-1], top_k_index.reshape(-1)
        placed = None
        for expert in range(self.num_experts):
            (pairs,) = (chosen == expert).nonzero(as_tuple=True)
            y = self._expert(expert, hidden_states[pairs // width])
            if placed is None:
                placed = y.new_zeros(chosen.shape[0], y.shape[-1])
            placed[pairs] = y
        assert placed is not None
        return placed

    @property
    def tokens(self) -> list[int] | None:
        """Number of tokens that calibration sent to each expert; None without data."""
        counts = [sum(n) for n in zip(*self.token_counts.values(), strict=True)]
        return counts or None

    def _expert(self, index: int, x: torch.Tensor) -> torch.Tensor:
        first, out = self.stacks.values()
        expert: Any = self._modules[str(index)]
        hidden = torch.cat([getattr(expert, part)(x) for part in first.parts], -1)
        hidden = (
            self.float_class._apply_gate(self, hidden) if self.has_gate else self.act_fn(hidden)
        )
        y: torch.Tensor = getattr(expert, out.parts[0])(hidden)
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def expect_stacked(self) -> None:
        """Declare stacked weights that the loader of Transformers will assign.

        The loader merges the stored matrices of all experts, packed or not, and assigns the result
        to the stacked name. ``__setattr__`` then gives each linear layer its view.

        Raises:
            ValueError: The matrices of a stack differ in shape or type.
        """
        for name, stack in self.stacks.items():
            if not stack.is_merged:
                continue
            layers: list[Any] = [self.get_submodule(p) for p in stack.layer_names(self.num_experts)]
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
        """Split a stacked parameter that is assigned, and give each linear layer its view."""
        if name not in self._parameters:
            super().__setattr__(name, value)
            return
        del self._parameters[name]
        for place, matrix in self.stacks[name]._replace(is_transposed=False).split(value):
            made = nn.Parameter(matrix.detach(), requires_grad=value.requires_grad)
            vars(made).update(vars(value))  # attributes that the loader set
            self.get_submodule(place)._parameters["weight"] = made

    def extra_repr(self) -> str:
        """Return the number of experts."""
        return f"{self.num_experts} experts"


# Name of a layer of experts -> the layer and its stacked parameters.
SplitExperts = dict[str, tuple[LinearExperts, dict[str, nn.Parameter | None]]]


def split_experts(model: nn.Module) -> SplitExperts:
    """Replace stacked parameters by linear layers for each expert, in place.

    The weights are views of the stacked parameters and take no memory.

    Returns:
        The layers and their stacked parameters, for ``stack_experts``.
    """
    layers = {name: module for name, module in model.named_modules() if is_stacked(module)}
    saved = _saved_parts(model, list(layers)) if layers else {}
    split: SplitExperts = {}
    for name, module in layers.items():
        parameters, kind = dict(module._parameters), type(module)
        stacks = {}
        for stack in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
            parts = saved.get(f"{name}.{stack}")
            stacks[stack] = Stack(parts or (stack,), bool(module.is_transposed), bool(parts))
        change_class(module, LinearExperts)
        assert isinstance(module, LinearExperts)
        module.float_class, module.stacks, module.token_counts = kind, stacks, {}
        _split(module)
        split[name] = module, parameters
    return split


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
        del module.stacks, module.float_class, module.token_counts
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
    """Whether a module is a layer of stacked experts, by the attributes that Transformers sets."""
    if "down_proj" not in module._parameters:  # nearly all modules
        return False
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
