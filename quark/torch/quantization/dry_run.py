"""Runs of a model without values and without its products: what they show depends on neither."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.graph.bare_copy import bare_copy
from quark.torch.quantization.nn.experts import is_stacked
from quark.torch.quantization.nn.layer import is_linear
from quark.torch.quantization.nn.linear_experts import LinearExperts


def zero_batch(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return a batch of zeros for a model of Transformers; None if its shape is not known."""
    config: Any = getattr(model, "config", None)
    argument = getattr(model, "main_input_name", None)
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="cpu")
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    if argument == "input_ids":
        batch = {argument: tokens}
    elif argument == "input_values":
        batch = {argument: torch.zeros(1, 16000, dtype=dtype, device="cpu")}  # a second of sound
    elif argument == "pixel_values":
        size = getattr(config, "image_size", 224)
        rows, columns = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        batch = {argument: torch.zeros(1, channels, rows, columns, dtype=dtype, device="cpu")}
    else:
        return None
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch


def without_products(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU that takes no memory, and whose linear layers give zeros.

    Which layers a model calls does not depend on values. Parameters are zeros, each one zero that
    is expanded to the shape. Experts give zeros too. Hooks, and what reads the values of a model in
    parts, are left out.
    """
    copied = bare_copy(model, {id(p): _without_values(p) for p in model.parameters()})
    for module in copied.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu")
        if isinstance(module, nn.Linear) and is_linear(type(module)):
            module.forward = partial(zero_products, module.out_features)  # type: ignore[method-assign]
        elif isinstance(module, LinearExperts) or is_stacked(module):
            module.forward = _zero_outputs
    return copied


def _without_values(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(
        torch.zeros((), dtype=x.dtype, device="cpu").expand(x.shape), requires_grad=False
    )


def zero_products(width: int, x: torch.Tensor) -> torch.Tensor:
    """Return zeros as the outputs of a linear layer, by its number of outputs."""
    return x.new_zeros(*x.shape[:-1], width)


def _zero_outputs(hidden_states: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden_states)
