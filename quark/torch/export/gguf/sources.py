"""Which tensors of a GGUF file hold the parameters of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from quark.torch.export.gguf.architectures import Architecture, tensor_names
from quark.torch.export.gguf.reader import GgufTensor
from quark.torch.quantization.nn.experts import stack_layouts
from quark.torch.quantization.nn.linear_experts import Stack


class Source(NamedTuple):
    """Where a parameter is in a file.

    Attributes:
        name: Name of the tensor.
        expert: Place on the first axis of the tensor; None if the tensor is the parameter.
        shape: Shape of the parameter.
    """

    name: str
    expert: int | None
    shape: tuple[int, ...]


class StackedParameter(NamedTuple):
    """A parameter of the model that holds matrices or biases of all experts of a layer.

    Attributes:
        experts: Name of the layer of experts.
        layout: Its layout.
        kind: What it holds of each linear layer: weight or bias.
    """

    experts: str
    layout: Stack
    kind: str

    @property
    def common_names(self) -> list[str]:
        """Names of what it holds, without the number of the expert."""
        return [f"{self.experts}.{part}.{self.kind}" for part in self.layout.parts]

    def split(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of values of the parameter, by the names that they have in split experts."""
        parts = self.layout.split(values)
        return {f"{self.experts}.{place}.{self.kind}": view for place, view in parts}


def stacked_parameters(model: nn.Module) -> dict[str, StackedParameter]:
    """Return the stacked parameters of a model by their names."""
    kinds = {"": "weight", "_bias": "bias"}
    return {
        f"{path}.{name}{ending}": StackedParameter(path, layout, kind)
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
    keys = [name for k in untied for name in (stacked[k].common_names if k in stacked else [k])]
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
                number, _, part = name.removeprefix(f"{stacked[key].experts}.").partition(".")
                stored = names[f"{stacked[key].experts}.{part}"]
                sources[name] = Source(stored, int(number), tuple(matrix.shape))
        elif key in names:
            shape = tensors[names[key]].shape
            is_row = len(shape) == 1 and parameter.dim() == 2  # such as that of a shared gate
            sources[key] = Source(names[key], None, (1, *shape) if is_row else shape)
    return sources


def _check_stack(
    stacked: StackedParameter,
    parameter: torch.Tensor,
    names: Mapping[str, str],
    tensors: Mapping[str, GgufTensor],
    path: Path,
) -> None:
    """Check that the tensors that hold a stacked parameter have its shape.

    It is checked before the parameter is split: as many experts as the file has are not many.
    """
    is_transposed = stacked.layout.is_transposed and parameter.dim() == 3
    rows = parameter.transpose(1, 2) if is_transposed else parameter
    parts = rows.chunk(len(stacked.layout.parts), 1)
    for part, name in zip(parts, stacked.common_names, strict=True):
        given = tensors[names[name]].shape
        if given != tuple(part.shape):
            raise ValueError(
                f"{path}: {names[name]} has the shape {list(given)}, expected {list(part.shape)} "
                f"for {len(part)} experts. Write the file again from the model, or copy it again."
            )
