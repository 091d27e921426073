"""Layers of experts whose weights are linear layers, one for each matrix of each expert."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


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

    It replaces a layer with stacked parameters. Subclasses compute as that layer does.

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
    token_counts: dict[int, list[int]]
    observes_all = False
    _calls: list[list[int]] | None = None

    @property
    def tokens(self) -> list[int] | None:
        """Number of tokens that calibration sent to each expert; None without data."""
        counts = [sum(n) for n in zip(*self.token_counts.values(), strict=True)]
        return counts or None

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
