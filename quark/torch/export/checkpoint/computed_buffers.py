"""Buffers that no checkpoint stores, such as frequencies: computed as the model would."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from quark.torch.export.checkpoint.placement import put_tensor
from quark.torch.pipeline.model_state import have_same_bits
from quark.torch.quantization.config.name_lookup import names_as_subject


def check_buffers(model: nn.Module) -> None:
    """Raise if a buffer that no checkpoint stores has no values and no way to compute them."""
    state = model.state_dict()
    absent = [n for n, b in model.named_buffers() if b.is_meta and n not in state]
    if absent and not hasattr(model, "_init_weights"):
        raise ValueError(
            f"{names_as_subject(absent)} not stored and cannot be computed: build the model on a "
            "real device instead of meta."
        )


def compute_buffers(model: nn.Module, device: torch.device, stored: Container[str] = ()) -> None:
    """Compute the buffers that no checkpoint stores, where they are on the meta device.

    As in Transformers, each module is initialized before the modules around it, which may write
    buffers of their parts. All is done twice, from other values and another random state: a buffer
    that has other values afterwards was not written whole, or is random.

    Args:
        model: The model.
        device: Where to compute them.
        stored: Names of buffers that a checkpoint stores, and that are read later.

    Raises:
        ValueError: The model does not compute a buffer. The model is unchanged then.
    """
    absent = {
        name: buffer
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_meta and name not in stored
    }
    if not absent:
        return
    held: list[dict[str, Any]] = [
        tensors for part in model.modules() for tensors in (part._parameters, part._buffers)
    ]
    read = [dict(tensors) for tensors in held]
    try:
        _hide(held)
        first, second = (_initialize(model, absent, device, fill) for fill in (0, 1))
    finally:
        for tensors, kept in zip(held, read, strict=True):
            tensors.update(kept)
    unknown = [name for name in absent if not have_same_bits(first[name], second[name])]
    if unknown:
        raise ValueError(
            f"{names_as_subject(unknown)} not stored, and {type(model).__name__} does not compute "
            "all values when it is initialized: load the checkpoint into a model that was built "
            "on a real device (import_model_from_safetensors(model, directory))."
        )
    for name, values in first.items():
        put_tensor(model, name, values)


def _hide(held: list[dict[str, Any]]) -> None:
    """Replace tensors by empty ones, which Transformers takes for read and does not initialize."""
    for tensors in held:
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensors[name]._is_hf_initialized = True


def _initialize(
    model: nn.Module, absent: Mapping[str, torch.Tensor], device: torch.device, fill: int
) -> dict[str, torch.Tensor]:
    """Return buffers as the model initializes them.

    Args:
        model: The model.
        absent: Names of the buffers -> tensors of their shapes and types.
        device: Where to compute them.
        fill: Their values before, and the seed.
    """
    for name, like in absent.items():
        put_tensor(model, name, torch.full(like.shape, fill, dtype=like.dtype, device=device))
    around = {name for buffer in absent for name in _modules_around(buffer)}
    inner_first = sorted(around, key=lambda name: len(name.split(".")) if name else 0, reverse=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(fill)
        for path in inner_first:
            _innermost_model(model, path)._init_weights(model.get_submodule(path))
    return {name: model.get_buffer(name).to(device) for name in absent}


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules around a tensor: ``a.b.w`` -> ``a.b``, ``a``, ""."""
    owners = name.split(".")[:-1]
    return [".".join(owners[:n]) for n in range(len(owners), -1, -1)]


def _innermost_model(model: nn.Module, name: str) -> Any:
    """Return the model around a module that knows how to initialize it, such as a vision tower."""
    around: Any = model
    for part in name.split("."):
        model = getattr(model, part) if part else model
        around = model if hasattr(model, "_init_weights") else around
    return around
