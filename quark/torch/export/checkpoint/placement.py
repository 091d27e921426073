"""Tensors of a checkpoint in a model: their places, and tensors that are tied."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn


def put_tensor(model: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor in the place of a parameter or buffer of that name."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, attribute)
    if isinstance(old, nn.Parameter) and tensor is not None:
        trainable = old.requires_grad and tensor.is_floating_point() and tensor.itemsize > 1
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=trainable))
    else:
        setattr(module, attribute, tensor)


def tie(model: nn.Module, tied: Mapping[str, str], absent: Collection[str]) -> None:
    """Tie tensors of a loaded model in place.

    Args:
        model: The model.
        tied: Names of tied tensors -> names of the tensors that they are tied to.
        absent: Names of tensors that are not stored.
    """
    for name, source in tied.items():
        if name in absent:
            path, _, attribute = name.rpartition(".")
            origin, _, kept = source.rpartition(".")
            shared = getattr(model.get_submodule(origin), kept)
            setattr(model.get_submodule(path), attribute, shared)
        elif hasattr(model, "config"):
            # Stored separately, so the tensors that the architecture ties differ in this model.
            model.config.tie_word_embeddings = False  # type: ignore[union-attr]


def places_of(devices: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Return the devices of tensors, and of modules by name: that of the first tensor in each.

    Tensors on the meta device have no place yet. Example: b.linear.weight on cuda:1, which is the
    only tensor -> the place of b.linear.weight, b.linear, b and "" is cuda:1.
    """
    places: dict[str, torch.device] = {}
    for name, device in devices.items():
        while device.type != "meta":
            places.setdefault(name, device)
            if not name:
                break
            name = name.rpartition(".")[0]
    return places


def place_of(name: str, places: Mapping[str, torch.device], default: torch.device) -> torch.device:
    """Return the place of a tensor, or of the innermost module around it that has one."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return places.get(name, default)
