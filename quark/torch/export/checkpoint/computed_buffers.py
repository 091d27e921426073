"""Buffers that no checkpoint stores, such as frequencies: computed as the model would."""

from __future__ import annotations

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


def _innermost_model(model: nn.Module, name: str) -> Any:
    """Return the model around a module that knows how to initialize it, such as a vision tower."""
    around: Any = model
    for part in name.split("."):
        model = getattr(model, part) if part else model
        around = model if hasattr(model, "_init_weights") else around
    return around


def compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Compute the buffers that no checkpoint stores, where they are on the meta device."""
    for path, module in model.named_modules():
        buffers = module._buffers
        absent = {n: b for n, b in buffers.items() if b is not None and b.is_meta}
        if not absent:
            continue
        # Transformers initializes a module with what is below it, such as the weights of
        # embeddings: what was read is put back afterwards.
        held = [tensors for m in module.modules() for tensors in (m._parameters, m._buffers)]
        read = [dict(tensors) for tensors in held]
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, absent_buffer in absent.items():
            shape, dtype = absent_buffer.shape, absent_buffer.dtype
            buffers[name] = torch.empty(shape, dtype=dtype, device=device)
        _innermost_model(model, path)._init_weights(module)
        computed = {name: buffers[name] for name in absent}
        for tensors, before in zip(held, read, strict=True):
            tensors.update(before)
        buffers.update(computed)
