"""Resolution of a configuration against a model: general names become names of its modules.

A configuration is often written before there is a model. Four of its values stand for a role that
each architecture names differently, and are resolved when a model is quantized:

- ``lm_head`` in ``exclude``: the output head, such as ``embed_out`` of GPT-NeoX.
- ``float_parts``: vision and audio towers, projectors, routers; see ``parts``.
- ``FUSED_PROJECTIONS`` as ``shared_scale_groups``: all layers that share an input.
- ``per_head`` without ``group_size``: the channels of a head; see ``head_sizes``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.head_sizes import with_head_sizes
from quark.torch.quantization.config.match import literal, matches
from quark.torch.quantization.config.parts import Part, find_parts, output_layers

OUTPUT_HEAD = "lm_head"
# Projections of Llama that inference software fuses, as in the schemes of the documented API.
FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def fused_projections() -> list[list[str]]:
    """Return a new list of ``FUSED_PROJECTIONS``, for ``Config.shared_scale_groups``."""
    return [list(group) for group in FUSED_PROJECTIONS]


def shares_inputs(config: Config) -> bool:
    """Whether all layers that share an input are to share scales, whatever their names."""
    return config.shared_scale_groups == fused_projections()


def output_head(model: nn.Module) -> list[str]:
    """Return the names of the layers of the output head of a model; see ``parts.output_layers``."""
    layers = {id(layer) for layer in output_layers(model)}
    return [name for name, module in model.named_modules() if id(module) in layers]


def resolve_exclude(exclude: Sequence[str], model: nn.Module) -> list[str]:
    """Return the patterns of ``exclude`` with the output head of the model for ``lm_head``."""
    head = [literal(name) for name in output_head(model)]
    if OUTPUT_HEAD not in exclude or not head:
        return list(exclude)
    is_name = any(name == OUTPUT_HEAD for name, _ in model.named_modules())
    general = [OUTPUT_HEAD] if is_name else []
    return list(dict.fromkeys([*general, *head, *(p for p in exclude if p != OUTPUT_HEAD)]))


def _pattern_of(part: Part, model: nn.Module) -> str:
    """Return the name pattern of the layers of a part."""
    is_layer = next(model.get_submodule(part.name).children(), None) is None
    return literal(part.name) if is_layer else f"{literal(part.name)}.*"


def resolve_names(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the names of a model, as far as no data has to run.

    The output head stands for ``lm_head`` in ``exclude``, and the parts of ``float_parts`` are
    added. Layers of towers make no key-value cache. Of ``FUSED_PROJECTIONS``, names
    without a layer in the model are left out.

    Raises:
        ValueError: Outputs have a scale per head, and the channels of a head are not known.
    """
    groups = config.shared_scale_groups
    names = [name for name, _ in model.named_modules()]
    if shares_inputs(config):
        endings = {name.rpartition(".")[2] for name in names}
        present = [[ending for ending in group if ending in endings] for group in groups]
        groups = [group for group in present if len(group) > 1]
    parts = find_parts(model)
    towers = [part for part in parts if part.kind == "tower"]
    without = {name for name in names if any(tower.holds(name) for tower in towers)}
    config = with_head_sizes(limit_cache(config, names, without), model)
    exclude = resolve_exclude(config.exclude, model)
    in_float = [_pattern_of(part, model) for part in parts if part.kind in config.float_parts]
    exclude += [pattern for pattern in in_float if pattern not in exclude]
    is_same = exclude == config.exclude and groups == config.shared_scale_groups
    if is_same and not config.float_parts:
        return config
    return replace(config, exclude=exclude, shared_scale_groups=groups, float_parts=[])


def limit_cache(config: Config, names: Iterable[str], without: Collection[str]) -> Config:
    """Return the configuration with a key-value cache and queries that some layers do not make.

    Args:
        config: The configuration.
        names: Names of all modules of the model.
        without: Names of layers that make none, such as the key projections of a vision tower.
    """
    names, cache = list(names), config.kv_cache_quant_config
    patterns = {**cache, **config.query_quant_config}
    exact: dict[str, list[str]] = {}
    for pattern in patterns:
        hit = [name for name in names if matches(name, [pattern])]
        kept = [name for name in hit if name not in without]
        if kept and len(kept) < len(hit):  # a pattern of such layers alone means them
            exact[pattern] = kept
    if not exact:
        return config

    def limited(
        layers: Mapping[str, QuantizationConfig], which: Collection[str] = tuple(exact)
    ) -> dict[str, QuantizationConfig]:
        names = {p: [literal(n) for n in exact[p]] for p in which if p in exact}
        return {key: layer for p, layer in layers.items() for key in names.get(p, [p])}

    return replace(
        config,
        kv_cache_quant_config=limited(cache),
        query_quant_config=limited(config.query_quant_config),
        layer_quant_config=limited(config.layer_quant_config, cache),
    )


def add_shared_inputs(config: Config, inputs: Iterable[Sequence[str]]) -> Config:
    """Return the configuration with layers that share an input in its ``shared_scale_groups``.

    Args:
        config: The configuration after ``resolve_names``.
        inputs: For each input that was read, the full names of the layers of one parent module
            that read it (``same_input_groups`` with single layers).
    """
    inputs = [list(group) for group in inputs]
    shared = config.shared_scale_groups
    patterns = [pattern for group in shared for pattern in _patterns(group)]
    groups = [group for group in inputs if len(group) > 1]
    unnamed = [group for group in groups if not all(matches(name, patterns) for name in group)]
    return replace(config, shared_scale_groups=[*shared, *_name_endings(unnamed, inputs)])


def _name_endings(
    groups: Iterable[Sequence[str]], inputs: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Return groups of full names as groups of the shortest endings that mean the same.

    Example: ``a.0.q``, ``a.0.k`` and ``a.1.q``, ``a.1.k`` become ``[["q", "k"]]``. Experts that no
    token reached are in no group, and have the endings of the experts that were reached. An ending
    gets longer where layers of the same names do not share an input in another parent:
    ``self_attn.k_proj`` beside ``cross_attn.k_proj``.
    """
    by_parent: dict[str, list[set[str]]] = defaultdict(list)
    for group in inputs:
        by_parent[group[0].rpartition(".")[0]].append(set(group))
    exact: dict[tuple[str, ...], bool] = {}
    for group in groups:
        for depth in range(1, 1 + max(name.count(".") for name in group) + 1):
            endings = tuple(".".join(name.split(".")[-depth:]) for name in group)
            if endings not in exact:
                exact[endings] = _is_exact(endings, by_parent)
            if exact[endings]:
                break
    return [list(endings) for endings, is_exact in exact.items() if is_exact]


def _is_exact(endings: Sequence[str], by_parent: Mapping[str, list[set[str]]]) -> bool:
    """Whether in every parent the layers with these endings share one input."""
    for groups in by_parent.values():
        hit = {name for group in groups for name in group if matches(name, _patterns(endings))}
        if hit and not any(hit <= group for group in groups):
            return False
    return True


def _patterns(endings: Iterable[str]) -> list[str]:
    return [pattern for ending in endings for pattern in (ending, f"*.{ending}")]
