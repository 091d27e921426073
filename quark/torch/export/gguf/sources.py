"""Which tensors of a GGUF file hold the parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.export.gguf.architectures import Architecture, matrices_of, tensor_names
from quark.torch.export.gguf.reader import GgufTensor
from quark.torch.quantization.nn.experts import stack_layouts
from quark.torch.quantization.nn.linear_experts import Stack


class Source(NamedTuple):
    """Where a parameter is in a file.

    Attributes:
        names: Names of the tensors: one, or several whose rows alternate in the parameter.
        expert: Place on the first axis of the tensors; None if the tensor is the parameter.
        shape: Shape of the parameter.
    """

    names: tuple[str, ...]
    expert: int | None
    shape: tuple[int, ...]


class StackedParameter(NamedTuple):
    """A parameter of the model that holds matrices or biases of all experts of a layer.

    Attributes:
        experts: Name of the layer of experts.
        layout: Its layout.
        kind: What it holds of each linear layer: weight or bias.
        matrices: Names of the parts of the layout -> matrices in GGUF whose rows they have.
    """

    experts: str
    layout: Stack
    kind: str
    matrices: dict[str, list[str]]

    def common_names(self, part: str) -> list[str]:
        """Return names of what it holds of a part, without the number of the expert."""
        return [f"{self.experts}.{matrix}.{self.kind}" for matrix in self.matrices[part]]

    def split(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of values of the parameter, by the names that they have in split experts."""
        parts = self.layout.split(values)
        return {f"{self.experts}.{place}.{self.kind}": view for place, view in parts}


def stacked_parameters(model: nn.Module, architecture: Architecture) -> dict[str, StackedParameter]:
    """Return the stacked parameters of a model by their names."""
    kinds = {"": "weight", "_bias": "bias"}
    return {
        f"{path}.{name}{ending}": StackedParameter(
            path, layout, kind, {p: matrices_of(p, architecture) for p in layout.parts}
        )
        for path, layouts in stack_layouts(model).items()
        for name, layout in layouts.items()
        for ending, kind in kinds.items()
        if f"{name}{ending}" in model.get_submodule(path)._parameters
    }


def names_in_file(
    model: nn.Module, architecture: Architecture, stacked: Mapping[str, StackedParameter]
) -> dict[str, str]:
    """Return names of parameters -> names in GGUF; see ``tensor_names``. Tied ones are left out."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    untied = [key for key in model.state_dict() if key not in tied]
    keys = [key for key in untied if key not in stacked]
    for parameter in stacked.values():
        keys += [name for part in parameter.matrices for name in parameter.common_names(part)]
    return tensor_names(architecture, model, keys)


def find_sources(
    model: nn.Module,
    names: Mapping[str, str],
    tensors: Mapping[str, GgufTensor],
    stacked: Mapping[str, StackedParameter],
    path: Path,
) -> dict[str, Source]:
    """Return the source of each parameter, by its name in the model with split experts.

    Args:
        model: The model, on the meta device.
        names: Result of ``names_in_file``.
        tensors: Headers of the tensors of the file; each of ``names`` is there.
        stacked: Result of ``stacked_parameters``.
        path: The file, for messages.

    Raises:
        ValueError: The tensor of a stack does not have the shape of that in the model.
    """
    sources = {}
    for key, parameter in model.state_dict().items():
        if key in stacked:
            _check_stack(stacked[key], parameter, names, tensors, path)
            for name, matrix in stacked[key].split(parameter).items():
                place = name.removeprefix(f"{stacked[key].experts}.")
                number, part, _ = place.split(".")
                stored = tuple(names[common] for common in stacked[key].common_names(part))
                sources[name] = Source(stored, int(number), tuple(matrix.shape))
        elif key in names:
            shape = tensors[names[key]].shape
            is_row = len(shape) == 1 and parameter.dim() == 2  # such as that of a shared gate
            sources[key] = Source((names[key],), None, (1, *shape) if is_row else shape)
    return sources


def _check_stack(
    stacked: StackedParameter,
    parameter: torch.Tensor,
    names: Mapping[str, str],
    tensors: Mapping[str, GgufTensor],
    path: Path,
) -> None:
    """Check that the tensors that hold a stacked parameter have its shape, and one type.

    It is checked before the parameter is split: as many experts as the file has are not many.
    """
    is_transposed = stacked.layout.is_transposed and parameter.dim() == 3
    rows = parameter.transpose(1, 2) if is_transposed else parameter
    parts = stacked.layout.parts
    for part, values in zip(parts, rows.chunk(len(parts), 1), strict=True):
        stored = [names[name] for name in stacked.common_names(part)]
        for number, name in enumerate(stored):
            given, expected = tensors[name].shape, values[:, number :: len(stored)].shape
            if given != tuple(expected):
                raise ValueError(
                    f"{path}: {name} has the shape {list(given)}, expected {list(expected)} for "
                    f"{len(values)} experts. Write the file again from the model, or copy it again."
                )
        kinds = {tensors[name].kind for name in stored}
        if len(kinds) > 1:
            raise ValueError(
                f"{path}: {' and '.join(stored)} are of the types {' and '.join(sorted(kinds))}, "
                "but their rows are in one matrix of the model. Write both in one type."
            )
