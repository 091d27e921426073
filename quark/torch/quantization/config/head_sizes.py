"""Channels of a head, for outputs that have a scale per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for
from quark.torch.quantization.config.type import QSchemeType

_FIELDS = (
    "layer_quant_config",
    "layer_type_quant_config",
    "kv_cache_quant_config",
    "query_quant_config",
)


def with_head_sizes(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the channels of a head where ``per_head`` leaves them open.

    Attention modules of Transformers have them as ``head_dim`` or ``head_size``.

    Args:
        config: How the model will be quantized.
        model: The float model; its parameters need no values.

    Raises:
        ValueError: The module around a layer has no ``head_dim``, or two of them differ.
    """
    if not any(_is_open(layer) for layer in _entries(config)):
        return config
    sizes: dict[int, str] = {}
    for name, module in model.named_modules():
        if next(module.children(), None) is not None or getattr(module, "weight", None) is None:
            continue
        layer = config_for(name, type(module), config)
        if layer is not None and _is_open(layer):
            sizes.setdefault(_head_size(model, name), name)
    if len(sizes) > 1:
        (size, name), (other, rival) = list(sizes.items())[:2]
        raise ValueError(
            f"per_head: the heads of {name} have {size} channels, those of {rival} {other}. Give "
            "each its own entry with group_size in kv_cache_quant_config."
        )
    if not sizes:
        return config
    size = next(iter(sizes))

    def sized(layer: QuantizationConfig) -> QuantizationConfig:
        if not _is_open(layer) or layer.output_tensors is None:
            return layer
        return replace(layer, output_tensors=replace(layer.output_tensors, group_size=size))

    fields = {f: {k: sized(layer) for k, layer in getattr(config, f).items()} for f in _FIELDS}
    whole = sized(config.global_quant_config)
    return replace(config, global_quant_config=whole, **fields)  # type: ignore[arg-type]  # by name


def _entries(config: Config) -> Iterator[QuantizationConfig]:
    """Iterate over all layer configurations."""
    yield config.global_quant_config
    for field in _FIELDS:
        yield from getattr(config, field).values()


def _is_open(layer: QuantizationConfig) -> bool:
    """Whether outputs have a scale per head, of a size that is not given."""
    spec = layer.output_tensors
    return spec is not None and spec.qscheme is QSchemeType.per_head and spec.group_size is None


def _head_size(model: nn.Module, name: str) -> int:
    """Return the channels of a head of the module around a layer.

    Raises:
        ValueError: It does not have them.
    """
    module = model.get_submodule(name.rpartition(".")[0])
    size = getattr(module, "head_dim", getattr(module, "head_size", None))
    if not isinstance(size, int) or size <= 0:
        raise ValueError(
            f"per_head: the {type(module).__name__} around {name} has no head_dim. Give the "
            "channels of a head as group_size in the Config."
        )
    return size
