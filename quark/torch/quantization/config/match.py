"""Which configuration applies to which module."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from quark.torch.quantization.config.config import (
    LAYER_TYPES,
    NAMED_ONLY,
    Config,
    QuantizationConfig,
)
from quark.torch.quantization.config.name_lookup import nearest

logger = logging.getLogger(__name__)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module name matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def literal(name: str) -> str:
    """Return the pattern that matches ``name`` alone, whatever characters it has."""
    return glob.escape(name)


def first_match(name: str, patterns: dict[str, QuantizationConfig]) -> QuantizationConfig | None:
    """Return the configuration of the first pattern that the name matches."""
    return next((c for pattern, c in patterns.items() if fnmatchcase(name, pattern)), None)


def config_for(name: str, kind: type[nn.Module], config: Config) -> QuantizationConfig | None:
    """Return the configuration of the module called ``name``, or None to leave it alone.

    By layer name, else by type, else global. Outputs that make the key-value cache are quantized
    even where the layer itself is excluded.
    """
    cache = first_match(name, config.kv_cache_quant_config)
    if matches(name, config.exclude):
        found = QuantizationConfig()
    else:
        found = (
            first_match(name, config.layer_quant_config)
            or config.layer_type_quant_config.get(kind)
            or (QuantizationConfig() if kind in NAMED_ONLY else config.global_quant_config)
        )
    if cache is not None and found.output_tensors is None:
        found = replace(found, output_tensors=cache.output_tensors)
    return None if found.is_empty else found


def assign(names: dict[str, type[nn.Module]], config: Config) -> dict[str, QuantizationConfig]:
    """Return the configuration of every module that has one, in the order given."""
    found = {name: config_for(name, kind, config) for name, kind in names.items()}
    return {name: layer for name, layer in found.items() if layer is not None}


def report_unmatched(names: Sequence[str], config: Config) -> list[str]:
    """Warn of patterns that match no module and return them."""
    fields = {
        "exclude": config.exclude,
        "layer_quant_config": list(config.layer_quant_config),
        "kv_cache_quant_config": list(config.kv_cache_quant_config),
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
    """Return a configuration that says the same whatever the order of its keys.

    Readers of ``config.json`` see its keys sorted, so where two patterns match one module the
    wrong one could win. Patterns are kept if sorting them changes nothing for this model; else
    each module that a pattern decides, or that writes a key-value cache, is listed by its full
    name. Wildcards in ``exclude`` are written out as well, for readers that compare names.
    """
    exclude: list[str] = []
    for pattern in config.exclude:
        hit = [n for n in names if fnmatchcase(n, pattern)]
        exclude += [n for n in (map(literal, hit) if hit else [pattern]) if n not in exclude]
    operators = {n: kind for n, kind in names.items() if kind.__name__ in (*LAYER_TYPES, "Conv1D")}
    layers = {n: _decided(n, kind, config) for n, kind in operators.items()}
    cache = {n: first_match(n, config.kv_cache_quant_config) for n in operators}
    return replace(
        config,
        exclude=exclude,
        layer_quant_config=_without_order(layers, config.layer_quant_config),
        kv_cache_quant_config=_without_order(cache, config.kv_cache_quant_config),
    )


def _decided(name: str, kind: type[nn.Module], config: Config) -> QuantizationConfig | None:
    """Return what ``layer_quant_config`` says of a module, with the outputs of the cache."""
    cached = first_match(name, config.kv_cache_quant_config) is not None
    if cached and not matches(name, config.exclude):
        return config_for(name, kind, config)
    return first_match(name, config.layer_quant_config)


def _without_order(
    exact: dict[str, QuantizationConfig | None], patterns: dict[str, QuantizationConfig]
) -> dict[str, QuantizationConfig]:
    by_key = dict(sorted(patterns.items()))
    if all(found == first_match(name, by_key) for name, found in exact.items()):
        return patterns
    return {literal(name): found for name, found in exact.items() if found is not None}
