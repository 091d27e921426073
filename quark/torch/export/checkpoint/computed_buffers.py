"""Buffers that no checkpoint stores, such as frequencies: computed as the model would."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn

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

    Args:
        model: The model.
        device: Where to compute them.
        stored: Names of buffers that a checkpoint stores, and that are read later.
    """
    for path, module in model.named_modules():
        buffers = module._buffers
        owner = f"{path}." if path else ""
        absent = {
            n: b
            for n, b in buffers.items()
            if b is not None and b.is_meta and f"{owner}{n}" not in stored
        }
        if not absent:
            continue
        # Transformers initializes a whole module, and some parts of it too (CLIP: the embeddings in
        # a module of them): tensors that were read are put back afterwards.
        held: list[dict[str, Any]] = [
            tensors for part in module.modules() for tensors in (part._parameters, part._buffers)
        ]
        read = [
            {n: t for n, t in tensors.items() if tensors is not buffers or n not in absent}
            for tensors in held
        ]
        for tensors in held:
            for name, tensor in tensors.items():
                place = device if tensors is buffers and name in absent else "meta"
                if tensor is not None:
                    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
        _innermost_model(model, path)._init_weights(module)
        for tensors, kept in zip(held, read, strict=True):
            tensors.update(kept)


def _innermost_model(model: nn.Module, name: str) -> Any:
    """Return the model around a module that knows how to initialize it, such as a vision tower."""
    around: Any = model
    for part in name.split("."):
        model = getattr(model, part) if part else model
        around = model if hasattr(model, "_init_weights") else around
    return around
