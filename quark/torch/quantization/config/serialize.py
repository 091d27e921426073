"""Configurations to plain JSON types and back, for every version since 0.8."""

from __future__ import annotations

from dataclasses import asdict, fields
from enum import Enum
from typing import Any

from torch import nn

from quark.torch.quantization.config.algo import AlgoConfig, algo_config_from_dict
from quark.torch.quantization.config.config import TENSORS, Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.names import one_of, unknown
from quark.torch.quantization.config.spec import QuantizationSpec

# Module types that a file may name: nothing else is ever looked up.
LAYER_TYPES: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding, nn.EmbeddingBag)
}

# Fields of ``Config`` that the checkpoint layout has no key for: they act before it is written.
_NOT_WRITTEN = {
    "export",
    "gpu_resident_blocks",
    "keep_prequantized_layers",
    "kv_cache_group",
    "log_severity_level",
    "min_kv_scale",
    "pre_quant_opt_config",
    "quant_flow",
    "shared_scale_groups",
    "sync_moe_expert_input_amax",
}
# Fields of ``QuantizationSpec`` likewise.
_SPEC_NOT_WRITTEN = {"qat_spec"}
_FOREIGN_KEYS = {"quant_method"}


def spec_to_dict(spec: QuantizationSpec) -> dict[str, Any]:
    """Return a specification as plain JSON types."""
    data = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {k: _plain(v) for k, v in sorted(data.items()) if k not in _SPEC_NOT_WRITTEN}


def spec_from_dict(data: Any) -> QuantizationSpec:
    """Make a specification from plain JSON types.

    Raises:
        ValueError: It is a list of several stages, or a key or name is unknown.
    """
    if isinstance(data, list):
        if len(data) != 1:
            raise ValueError(
                f"A tensor quantized in {len(data)} stages is not supported by this version."
            )
        data = data[0]
    given = _known(data, QuantizationSpec, "tensor specification")
    return QuantizationSpec(**{"dtype": None, **given})


def layer_to_dict(layer: QuantizationConfig) -> dict[str, Any]:
    """Return the configuration of a layer as plain JSON types."""
    specs = {name: getattr(layer, name) for name in TENSORS}
    data: dict[str, Any] = {n: None if s is None else spec_to_dict(s) for n, s in specs.items()}
    data["target_device"] = _plain(layer.target_device)
    return dict(sorted(data.items()))


def layer_from_dict(data: dict[str, Any] | None) -> QuantizationConfig:
    """Make the configuration of a layer from plain JSON types; None quantizes nothing."""
    given = _known(data or {}, QuantizationConfig, "layer configuration")
    for name in TENSORS:
        if given.get(name) is not None:
            given[name] = spec_from_dict(given[name])
    return QuantizationConfig(**given)


def config_to_dict(config: Config, everything: bool = False) -> dict[str, Any]:
    """Return the configuration of a model as plain JSON types.

    Args:
        config: The configuration.
        everything: Whether to keep also the fields that a checkpoint has no key for.
    """
    data: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name.endswith("quant_config"):
            value = _layers_to_dict(f.name, value)
        elif f.name in ("algo_config", "pre_quant_opt_config"):
            value = None if value is None else [asdict(a) for a in value]
        elif f.name == "softmax_quant_spec":
            value = None if value is None else spec_to_dict(value)
        elif f.name == "export":
            value = None if value is None else asdict(value)
        if everything or f.name not in _NOT_WRITTEN or (f.name == "export" and value):
            data[f.name] = _plain(value)
    return dict(sorted(data.items()))


def config_from_dict(data: dict[str, Any]) -> Config:
    """Make the configuration of a model from plain JSON types.

    Raises:
        ValueError: A key or name is unknown; the nearest known one is named.
    """
    given = _known(
        {k: v for k, v in data.items() if k not in _FOREIGN_KEYS}, Config, "quantization_config"
    )
    for name, value in given.items():
        if value is None:
            continue
        if name.endswith("quant_config"):
            given[name] = _layers_from_dict(name, value)
        elif name in ("algo_config", "pre_quant_opt_config"):
            given[name] = [_algo(a) for a in (value if isinstance(value, list) else [value])]
        elif name == "softmax_quant_spec":
            given[name] = spec_from_dict(value)
        elif name == "export":
            known = _known(value, JsonExporterConfig, "quantization_config.export")
            given[name] = JsonExporterConfig(**known)
    if given.get("global_quant_config") is None:
        given["global_quant_config"] = QuantizationConfig()
    return Config(**given)


def _layers_to_dict(name: str, value: Any) -> Any:
    if name == "global_quant_config":
        return layer_to_dict(value)
    if name == "layer_type_quant_config":
        return {kind.__name__: layer_to_dict(layer) for kind, layer in value.items()}
    return {pattern: layer_to_dict(layer) for pattern, layer in value.items()}


def _layers_from_dict(name: str, value: Any) -> Any:
    if name == "global_quant_config":
        return layer_from_dict(value)
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object of layer configurations, got {value!r}.")
    layers = {key: layer_from_dict(layer) for key, layer in value.items()}
    if name == "layer_type_quant_config":
        return {LAYER_TYPES[one_of(k, LAYER_TYPES, name)]: v for k, v in layers.items()}
    return layers


def _algo(value: Any) -> AlgoConfig:
    return value if isinstance(value, AlgoConfig) else algo_config_from_dict(value)


def _known(data: Any, cls: type, what: str) -> dict[str, Any]:
    """Return ``data`` if all its keys are fields of ``cls``."""
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected an object, got {data!r}.")
    names = sorted(f.name for f in fields(cls))
    for key in data:
        if key not in names:
            raise ValueError(unknown(key, names, f"key of {what}"))
    return dict(data)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type):
        return value.__name__
    return value
