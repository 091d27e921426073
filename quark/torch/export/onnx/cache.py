"""Decoders with a cache in ONNX: keys and values are inputs and outputs of the graph.

The inputs ``past_key_values.0.key``, ``past_key_values.0.value``, … are (batch, heads, earlier
tokens, size), the outputs ``present.0.key``, … the same with the new tokens added. A first call
gets inputs without earlier tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

PAST, PRESENT = "past_key_values", "present"
PARTS = ("key", "value")
MIN_TOKENS = 5  # at least two earlier and two new ones, in different numbers
_TOKENS = "input_ids"


def with_cache(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs of a later call: the last tokens, and keys and values of those before.

    Masks keep the length of all tokens, since they tell which keys count.

    Args:
        model: A decoder of Transformers.
        tensors: Inputs for all tokens: ``input_ids`` (batch, tokens), and others by name.

    Raises:
        ValueError: There are no ``input_ids`` of enough tokens, or the model keeps something other
            than keys and values, or nothing.
    """
    ids = tensors.get(_TOKENS)
    if ids is None or ids.dim() != 2 or ids.shape[1] < MIN_TOKENS:
        raise ValueError(
            f"use_cache needs input_args with {_TOKENS} of at least {MIN_TOKENS} tokens, got "
            f"{None if ids is None else list(ids.shape)}."
        )
    from transformers import DynamicCache

    count = ids.shape[1]
    past = count // 2 + 1
    first = {n: x[:, :past] if _has_tokens(x, count) else x for n, x in tensors.items()}
    cache = DynamicCache()
    try:
        with torch.no_grad():
            model(**first, past_key_values=cache, use_cache=True)
        pairs = [_pair(layer) for layer in cache.layers]
        is_sound = pairs and all(x.dim() == 4 and x.shape[2] == past for p in pairs for x in p)
    except (AttributeError, IndexError, TypeError):  # it takes no such cache
        is_sound = False
    if not is_sound:
        raise ValueError(
            f"use_cache: {type(model).__name__} does not keep keys and values of all earlier "
            "tokens in a DynamicCache, which the graph has as inputs. Leave use_cache out."
        )
    rest = {n: x[:, past:] if n == _TOKENS or _is_position(n) else x for n, x in tensors.items()}
    named = zip(_names(PAST, len(pairs)), (x for pair in pairs for x in pair), strict=True)
    return {**rest, **dict(named)}


def cache_axes(tensors: Mapping[str, torch.Tensor]) -> list[Mapping[int, str]]:
    """Return names of the axes of any size of inputs with keys and values."""
    new, axes = tensors[_TOKENS].shape[1], list[Mapping[int, str]]()
    for name, tensor in tensors.items():
        if is_past(name):
            axes.append({0: "batch", 2: "past_sequence"})
        elif tensor.dim() == 2:
            axes.append({0: "batch", 1: "sequence" if tensor.shape[1] == new else "total_sequence"})
        else:
            axes.append({0: "batch"} if tensor.dim() else {})
    return axes


def is_past(name: str) -> bool:
    """Whether an input holds earlier keys or values."""
    return name.startswith(f"{PAST}.")


def call(model: nn.Module, tensors: Mapping[str, torch.Tensor], constants: Any) -> Any:
    """Return what a model returns for inputs, with keys and values if the inputs have them.

    Args:
        model: The model.
        tensors: Its inputs; ``past_key_values.0.key`` and so on become a cache.
        constants: Other arguments.
    """
    past = [tensor for name, tensor in tensors.items() if is_past(name)]
    if not past:
        return model(**tensors, **constants)
    from transformers import DynamicCache

    cache = DynamicCache(zip(past[::2], past[1::2], strict=True))
    rest = {name: tensor for name, tensor in tensors.items() if not is_past(name)}
    output = model(**rest, **{**constants, "use_cache": True}, past_key_values=cache)
    present = [x for layer in cache.layers for x in _pair(layer)]
    named = zip(_names(PRESENT, len(cache.layers)), present, strict=True)
    return {"logits": output["logits"], **dict(named)}


def _pair(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a layer of a cache."""
    return layer.keys, layer.values


def _names(kind: str, layers: int) -> list[str]:
    return [f"{kind}.{i}.{part}" for i in range(layers) for part in PARTS]


def _has_tokens(tensor: torch.Tensor, count: int) -> bool:
    """Whether the second axis of an input are tokens."""
    return tensor.dim() == 2 and tensor.shape[1] == count


def _is_position(name: str) -> bool:
    """Whether an input has an entry for each new token alone."""
    return name in ("position_ids", "token_type_ids")
