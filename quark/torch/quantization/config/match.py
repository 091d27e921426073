"""Matching of module names and types with the entries of a configuration."""

from __future__ import annotations

import glob
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.name_lookup import nearest

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def literal(name: str) -> str:
    """Return the pattern that matches ``name`` only; special characters are escaped."""
    return glob.escape(name)


def first_match(name: str, patterns: dict[str, QuantizationConfig]) -> QuantizationConfig | None:
    """Return the configuration of the first pattern that matches a name."""
    return next((c for pattern, c in patterns.items() if fnmatchcase(name, pattern)), None)


def config_for(
    name: str, kind: type[nn.Module] | None, config: Config
) -> QuantizationConfig | None:
    """Return the configuration of the module called ``name``, or None if it stays in float.

    The entry is chosen by name, else by type, else it is the global one. Outputs that make the
    key-value cache, and queries, are quantized even if the layer is excluded.

    Args:
        name: Full name of the module.
        kind: Its type; None for ``nn.Linear``.
        config: Configuration of the model.
    """
    inside = _of_attention(name, config)
    if matches(name, config.exclude):
        layer = QuantizationConfig()
    else:
        layer = first_match(name, config.layer_quant_config) or _config_for_type(kind, config)
    if inside is not None and layer.output_tensors is None:
        layer = replace(layer, output_tensors=inside.output_tensors)
    return None if layer.is_empty else layer


def _of_attention(name: str, config: Config) -> QuantizationConfig | None:
    """Return the entry of a layer whose outputs attention takes: of the cache, or queries."""
    cache = first_match(name, config.kv_cache_quant_config)
    return cache or first_match(name, config.query_quant_config)


def _config_for_type(kind: type[nn.Module] | None, config: Config) -> QuantizationConfig:
    """Return the configuration of modules of a type that no name selects."""
    if kind is None and not config.layer_type_quant_config:
        return config.global_quant_config
    from torch.nn import Linear

    from quark.torch.quantization.config.layer_types import NAMED_ONLY
    from quark.torch.quantization.config.linear_classes import operator_class

    kind = operator_class(kind or Linear)
    usual = QuantizationConfig() if kind in NAMED_ONLY else config.global_quant_config
    return config.layer_type_quant_config.get(kind) or usual


def assign(names: dict[str, type[nn.Module]], config: Config) -> dict[str, QuantizationConfig]:
    """Return the configuration of every module to quantize, in the given order."""
    layers = {name: config_for(name, kind, config) for name, kind in names.items()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def report_unmatched(names: Sequence[str], config: Config) -> list[str]:
    """Warn about patterns that match no module, and return them."""
    fields = {
        "exclude": config.exclude,
        "layer_quant_config": list(config.layer_quant_config),
        "kv_cache_quant_config": list(config.kv_cache_quant_config),
        "query_quant_config": list(config.query_quant_config),
        "kv_cache_group": config.kv_cache_group,
        "shared_scale_groups": [f"*{p.lstrip('*')}" for g in config.shared_scale_groups for p in g],
    }
    idle = []
    for field, patterns in fields.items():
        for pattern in patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                continue
            idle.append(pattern)
            near = nearest(pattern.strip("*"), {n.rsplit(".", 1)[-1] for n in names} | set(names))
            hint = f"Nearest: {', '.join(near)}." if near else f"Modules: {_sample(names)}."
            logger.warning(
                "%s: pattern %r matches no module of the model. %s", field, pattern, hint
            )
    return idle


def _sample(names: Sequence[str]) -> str:
    return ", ".join([n for n in names if n][:8]) + (", …" if len(names) > 8 else "")


def without_order(names: dict[str, type[nn.Module]], config: Config) -> Config:
    """Return an equivalent configuration whose meaning does not depend on the order of its keys.

    Readers of ``config.json`` see its keys sorted, so another pattern could become the first match
    of a module. Patterns stay if sorting them changes nothing for this model. Otherwise each module
    that a pattern selects, or whose outputs attention takes, is listed by its full name. Wildcards
    in ``exclude`` are replaced by full names, for readers that compare names.
    """
    exclude: list[str] = []
    for pattern in config.exclude:
        hit = [n for n in names if fnmatchcase(n, pattern)]
        exclude += [n for n in (map(literal, hit) if hit else [pattern]) if n not in exclude]
    from quark.torch.quantization.config.layer_types import LAYER_TYPES
    from quark.torch.quantization.config.linear_classes import operator_class

    kinds = (*LAYER_TYPES, "Conv1D")
    operators = {n: kind for n, kind in names.items() if operator_class(kind).__name__ in kinds}
    layers = {n: _decided(n, kind, config) for n, kind in operators.items()}
    cache = {n: first_match(n, config.kv_cache_quant_config) for n in operators}
    queries = {n: first_match(n, config.query_quant_config) for n in operators}
    return replace(
        config,
        exclude=exclude,
        layer_quant_config=_without_order(layers, config.layer_quant_config),
        kv_cache_quant_config=_without_order(cache, config.kv_cache_quant_config),
        query_quant_config=_without_order(queries, config.query_quant_config),
    )


def _decided(name: str, kind: type[nn.Module], config: Config) -> QuantizationConfig | None:
    """Return the entry of ``layer_quant_config`` for a module, with outputs for attention."""
    if _of_attention(name, config) is not None and not matches(name, config.exclude):
        return config_for(name, kind, config)
    return first_match(name, config.layer_quant_config)


def _without_order(
    exact: dict[str, QuantizationConfig | None], patterns: dict[str, QuantizationConfig]
) -> dict[str, QuantizationConfig]:
    by_key = dict(sorted(patterns.items()))
    if all(layer == first_match(name, by_key) for name, layer in exact.items()):
        return patterns
    return {literal(name): layer for name, layer in exact.items() if layer is not None}


def with_layers(
    names: Mapping[str, type[nn.Module]], config: Config, layers: Mapping[str, QuantizationConfig]
) -> Config:
    """Return the configuration that quantizes some more layers.

    They are named by patterns that match no other module, where there are such. Patterns of
    ``exclude`` that match one of them are replaced by the names of the other modules.

    Args:
        names: All modules of the model: names -> types.
        config: The configuration.
        layers: Names of the layers -> how they are quantized.
    """
    exclude: list[str] = []
    for pattern in config.exclude:
        hit = [name for name in names if fnmatchcase(name, pattern)]
        is_kept = any(name in layers for name in hit)
        exclude += [literal(n) for n in hit if n not in layers] if is_kept else [pattern]
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    texts = {id(layer): repr(layer) for layer in layers.values()}
    for name, layer in layers.items():
        alike[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), texts[id(layer)]].append(name)
    patterns: dict[str, QuantizationConfig] = {}
    for (pattern, _), members in alike.items():
        is_exact = sum(fnmatchcase(name, pattern) for name in names) == len(members)
        keys = [pattern] if is_exact else map(literal, members)
        patterns |= dict.fromkeys(keys, layers[members[0]])
    return replace(
        config,
        exclude=list(dict.fromkeys(exclude)),
        layer_quant_config=patterns | config.layer_quant_config,
    )
