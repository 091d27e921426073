"""Layers of attention that give queries, keys and values together, found by their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import literal, matches
from quark.torch.quantization.nn.attention import uses_interface
from quark.torch.quantization.nn.layer import channel_count, float_class, is_linear


def fused_layers(model: nn.Module) -> list[str]:
    """Return the names of the layers that give queries, keys and values together.

    Such an attention module has two linear layers. The second reads the values of all queries; the
    first has more outputs than that. A trial proves what it computes before it is quantized.

    Args:
        model: A float model; its parameters need no values.
    """
    found = []
    for name, module in model.named_modules():
        layers = [(n, m) for n, m in module.named_children() if is_linear(float_class(m))]
        if len(layers) != 2 or not uses_interface(module):
            continue
        for (child, fused), (_, output) in (layers, layers[::-1]):
            given, read = _channels(fused, "output_tensors"), _channels(output, "input_tensors")
            if given > read:
                found.append(f"{name}.{child}")
    return found


def with_fused_layers(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the layers that give keys and values in this model.

    Patterns of ``kv_cache_quant_config`` that match no module stand for them, if attention
    quantizes keys and values itself, queries stay in float, and all patterns have one scheme.

    Args:
        config: How the model will be quantized.
        model: The float model; its parameters need no values.
    """
    cache = config.kv_cache_quant_config
    names = [name for name, _ in model.named_modules()]
    is_open = config.kv_cache_post_rope and not config.query_quant_config and bool(cache)
    if not is_open or any(matches(name, cache) for name in names):
        return config
    layer, *others = cache.values()
    layers = fused_layers(model)
    if not layers or any(other.output_tensors != layer.output_tensors for other in others):
        return config
    patterns = _patterns(layers, names)
    kept = {p: entry for p, entry in config.layer_quant_config.items() if p not in cache}
    is_group = config.kv_cache_group == list(cache)
    return replace(
        config,
        layer_quant_config=kept,
        kv_cache_quant_config=dict.fromkeys(patterns, layer),
        kv_cache_group=patterns if is_group else config.kv_cache_group,
    )


def _patterns(layers: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return patterns of the endings of layers if these match no other module, else their names."""
    patterns = list(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in layers))
    is_exact = {name for name in names if matches(name, patterns)} == set(layers)
    return patterns if is_exact else [literal(name) for name in layers]


def _channels(layer: nn.Module, name: str) -> int:
    """Return the number of channels of the inputs or outputs of a linear layer."""
    count = channel_count(layer, name)
    assert count is not None
    return count
