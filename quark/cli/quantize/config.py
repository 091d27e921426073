"""The configuration of ``quark quantize``, from its flags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import wrong
from quark.cli.option_words import in_json
from quark.cli.options import in_words
from quark.cli.other_names import FLOAT_CACHES, FLOATS
from quark.cli.quantize.algorithm_options import find_recipe, make_algorithms
from quark.cli.quantize.request import Request, split_names

logger = logging.getLogger(__name__)

_WHAT_CONFIG = (
    "Give the JSON of Config.to_dict() or a file of 'quark search', or --quant_scheme instead; "
    "docs/from-other-tools.md names the schemes of other tools."
)

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec
    from quark.torch.quantization.config.template import LLMTemplate


def make_config(request: Request, model_type: str) -> Config:
    """Return the configuration of a request.

    Args:
        request: The flags.
        model_type: Type of the model, as in its ``config.json``.

    Raises:
        typer.BadParameter: A name is unknown, or flags do not fit the schemes.
    """
    from quark.torch.quantization.config.resolution import fused_projections

    if request.recipe is not None:
        request = replace(request, quant_scheme=find_recipe(request.recipe)[0])
    config = (
        _read_config_file(request.config)
        if request.config
        else _build_from_schemes(request, model_type)
    )
    _check_options(request, config)
    check_algorithms(config)
    if request.statistics is not None:
        _check_statistics(config)
    _check_containers(request, config)
    if request.weight_matrix_merge:
        _check_shared(config)
        config = replace(config, shared_scale_groups=fused_projections())
    if request.moe_calibrate_all_experts:
        config = replace(config, moe_calibrate_all_experts=True)
    return config


def _check_options(request: Request, config: Config) -> None:
    """Check that the files of options have no option that is not supported."""
    from quark.torch.quantization.config.compatibility import check_compatibility
    from quark.torch.quantization.config.type import QuantizationMode

    if request.is_graph:
        config = replace(config, quant_mode=QuantizationMode.eager_mode)  # graphs have both
    try:
        check_compatibility(config)
    except ValueError as error:
        flag = "--quant_algo_config_file" if request.config is None else "--config"
        raise wrong(flag, str(error)) from None


def _check_statistics(config: Config) -> None:
    from quark.torch.quantization import calibration
    from quark.torch.quantization.algorithms import check_from_statistics, find_algorithms

    try:
        is_static = calibration.needs_data(layer_configs(config))
        check_from_statistics(find_algorithms(config), is_static)
    except ValueError as error:
        raise wrong("--statistics", str(error)) from None


def _check_containers(request: Request, config: Config) -> None:
    """Check that the containers to write can hold the configuration."""
    from quark.torch.export.containers.base import get_container

    try:
        for name in request.exports:
            get_container(name).check_config(layer_configs(config))
    except ValueError as error:
        raise wrong("--model_export", str(error)) from None


def layer_configs(config: Config) -> Iterator[QuantizationConfig]:
    """Iterate over all layer configurations of a configuration.

    Probabilities of attention are the output of a layer of their own.
    """
    from quark.torch.quantization.config.attention import softmax_layers

    yield config.global_quant_config
    for by_name in (
        config.layer_quant_config,
        config.kv_cache_quant_config,
        config.query_quant_config,
    ):
        yield from by_name.values()
    yield from config.layer_type_quant_config.values()
    yield from softmax_layers(config)


def needs_data(config: Config, has_statistics: bool = False) -> bool:
    """Whether a configuration has algorithms or activation scales that need calibration data.

    Args:
        config: The configuration.
        has_statistics: Whether statistics are given, which replace data where they suffice.
    """
    from quark.torch.quantization import calibration
    from quark.torch.quantization.algorithms import find_algorithms, ranges_from_statistics

    algorithms, layers = find_algorithms(config), list(layer_configs(config))
    if has_statistics and ranges_from_statistics(config, algorithms, layers):
        return False
    learns = any(algorithm.needs_data(options) for algorithm, options in algorithms)
    return (learns and not has_statistics) or calibration.needs_data(layers)


def _check_shared(config: Config) -> None:
    """Check that some weight has a scale per tensor, which layers can share."""
    from quark.torch.quantization.config.type import QSchemeType

    weights = [layer.weight.scheme for layer in layer_configs(config) if layer.weight is not None]
    if not any(
        scheme.scale.two_level or (scheme.qscheme is QSchemeType.per_tensor and scheme.symmetric)
        for scheme in weights
    ):
        raise wrong(
            "--weight_matrix_merge",
            "only per-tensor scales of symmetric weights can be shared, and no scheme given here "
            "has them. Leave it out.",
        )


def _read_config_file(path: Path) -> Config:
    from quark.torch.files import read_json
    from quark.torch.quantization.config.builder import is_two_level
    from quark.torch.quantization.config.config import Config

    if not path.is_file():
        raise wrong("--config", f"there is no file {path}.")
    try:
        data = read_json(path)
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, got {type(data).__name__}.")
    except ValueError as error:
        raise wrong("--config", f"{path} is not a Config: {error} {_WHAT_CONFIG}") from None
    if (described := _foreign_settings(data)) is not None:
        raise wrong("--config", f"{path} is not a Config: it is {described}. {_WHAT_CONFIG}")
    try:
        config = Config.from_dict(data)
    except (TypeError, ValueError) as error:
        raise wrong("--config", f"{path} is not a Config: {error}") from None
    if "shared_scale_groups" not in data and any(map(is_two_level, layer_configs(config))):
        logger.warning(
            "--config: %s has no shared_scale_groups, so layers that share an input have tensor "
            "scales of their own, which servers that fuse them may not support. Write the file "
            "with to_dict(everything=True), or add the key ([] if this is meant).",
            path,
        )
    return config


def _foreign_settings(data: dict[str, Any]) -> str | None:
    """Return the name of a JSON file of other software; None if it may be a configuration."""
    if "quantization_config" in data or "architectures" in data:
        return "the config.json of a model"
    method = data.get("quant_method", "quark")
    return None if method == "quark" else f"a configuration of {method}"


def _build_from_schemes(request: Request, model_type: str) -> Config:
    from quark.torch.quantization.config.builder import (
        Attention,
        KVCache,
        build_config,
        cache_beside,
    )
    from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES
    from quark.torch.quantization.config.template import LLMTemplate

    if request.kv_cache_dtype is not None:
        _check_cache_name(request.kv_cache_dtype, KV_CACHE_SCHEMES)
    assert request.quant_scheme is not None
    main, size = request.quant_scheme, request.group_size
    whole = layer_scheme("--quant_scheme", main, size)
    layers = {p: layer_scheme("--quant_scheme", main, n) for p, n in request.layer_group_sizes}
    for pattern, name in request.layer_schemes:
        layers.setdefault(pattern, layer_scheme("--layer_quant_scheme", name, size))
    _check_sizes(request, main)
    _check_scales(request, [whole, *layers.values()])
    template, cache, attention = LLMTemplate.get(model_type), None, None
    if request.kv_cache_dtype is not None:
        floor = request.min_kv_scale or 0.0
        names = template.kv_layers_name
        cache = KVCache(request.kv_cache_dtype, names, floor, request.kv_cache_post_rope)
    if request.attention is not None:
        patterns = template.query_patterns, template.kv_layers_name
        attention = Attention(request.attention, *patterns)
        try:
            cache = cache_beside(attention, cache)
        except ValueError as error:
            raise wrong("--kv_cache_dtype", str(error)) from None
    try:
        return build_config(
            _set_scales(whole, request),
            layers={p: _set_scales(layer, request) for p, layer in layers.items()},
            exclude=template.exclude_layers_name if request.excluded is None else request.excluded,
            algorithms=make_algorithms(request),
            kv_cache=cache,
            attention=attention,
            float_parts=_excluded_parts(request, template),
        )
    except ValueError as error:
        raise wrong("--layer_quant_scheme", str(error)) from None


def _check_cache_name(name: str, names: Iterable[str]) -> None:
    """Check that a scheme of the cache is known; the message names all of its format."""
    if name.lower() in FLOAT_CACHES:
        raise wrong("--kv_cache_dtype", "a cache in float is the default. Leave it out.")
    of_format = [known for known in names if known.startswith(f"{name.lower()}_per_")]
    if of_format and name.lower() not in names:
        raise wrong("--kv_cache_dtype", f"{name!r} is unknown. Give {in_words(of_format)}.")
    check_name("--kv_cache_dtype", name, names)


def _excluded_parts(request: Request, template: LLMTemplate) -> list[str]:
    """Return the kinds of parts that stay in float: all but those of ``--include_parts``."""
    from quark.torch.quantization.config.part_kinds import check_parts

    if request.excluded is not None:
        if request.include_parts:
            raise wrong(
                "--include_parts",
                "--exclude_layers names all layers that stay in float. Leave one of them out.",
            )
        return []
    included = split_names(request.include_parts or [])
    try:
        included = check_parts(included)
    except ValueError as error:
        raise wrong("--include_parts", str(error).removeprefix("float_parts: ")) from None
    return [kind for kind in template.float_parts if kind not in included]


def _check_sizes(request: Request, main: str) -> None:
    """Check that the schemes take the group sizes of the flags."""
    names = [main, *(name for _, name in request.layer_schemes)]
    sized = [name for name in names if _is_sized(name)]
    fits = {"group_size": bool(sized), "group_size_per_layer": main in sized}
    for flag, fit in fits.items():
        if getattr(request, flag) is not None and not fit:
            raise wrong(
                f"--{flag}", f"{main} has no groups, or fixes their size. {_instead(request)}"
            )


def _instead(request: Request) -> str:
    """Return the advice for a group size that does not fit the scheme, as a sentence."""
    from quark.torch.quantization.config.presets import scheme_names

    prefix = str(request.quant_scheme).lower().rpartition("_")[0]
    sized = f"{prefix}_{request.group_size}"
    is_known = request.group_size is not None and sized in scheme_names()
    is_known &= sized != str(request.quant_scheme).lower()
    return f"Give --quant_scheme {sized}." if is_known else "Leave it out."


# Flag, and field of a specification -> whether the flag applies to a specification.
_SCALE_FIELDS: dict[str, Callable[[QuantizationSpec], bool]] = {
    "scale_format": lambda spec: spec.scale_format == "float32" and spec.second_stage is None,
    "scale_calculation_mode": lambda spec: spec.scale_calculation_mode is not None,
}


def _check_scales(request: Request, layers: list[QuantizationConfig]) -> None:
    """Check that the flags about scales apply to some tensor."""
    specs = [spec for layer in layers for _, spec in layer.specs()]
    for flag, is_open in _SCALE_FIELDS.items():
        if flag in request.given and not any(map(is_open, specs)):
            raise wrong(f"--{flag}", f"{request.quant_scheme} fixes it. Leave it out.")


def _set_scales(layer: QuantizationConfig, request: Request) -> QuantizationConfig:
    """Return the configuration of a layer with the scales of the flags."""
    for flag, is_open in _SCALE_FIELDS.items():
        value = getattr(request, flag)
        if value is not None:
            specs: dict[str, Any] = {
                n: replace(s, **{flag: value}) for n, s in layer.specs() if is_open(s)
            }
            layer = replace(layer, **specs)
    return layer


def check_algorithms(config: Config) -> None:
    """Check that every algorithm is available and applies to some layer.

    Raises:
        typer.BadParameter: An algorithm is not available, or applies to no layer.
    """
    from quark.torch.quantization.algorithms import find_algorithms

    layers = {str(number): layer for number, layer in enumerate(layer_configs(config))}
    try:
        for algorithm, options in find_algorithms(config):
            algorithm.check(options, layers)
    except ValueError as error:
        raise wrong("--quant_algo", in_json(str(error))) from None


def layer_scheme(flag: str, name: str, group_size: int | None = None) -> QuantizationConfig:
    """Return the layer configuration of a scheme.

    Args:
        flag: Flag that names the scheme, for the error.
        name: Name of the scheme.
        group_size: Group size, for schemes that do not fix it (default 128).

    Raises:
        typer.BadParameter: No scheme has that name; the message names the nearest.
    """
    from quark.torch.quantization.config import presets

    try:
        return presets.scheme(name, group_size or presets.GROUP_SIZE)
    except ValueError as error:
        aliases = map(str.upper, presets.ALIASES)
        check_name(flag, name, [*presets.scheme_names(), *aliases])
        raise wrong(flag, str(error)) from None


def _is_sized(name: str) -> bool:
    """Whether the group size of a scheme can be chosen."""
    return layer_scheme("", name, 32) != layer_scheme("", name, 64)


def check_name(flag: str, name: str, names: Iterable[str]) -> None:
    """Check that a name is known, in any case.

    Raises:
        typer.BadParameter: The name is unknown; the message names the nearest.
    """
    from quark.torch.quantization.config.algo import ALGO_CONFIGS
    from quark.torch.quantization.config.presets import similar_scheme

    names = list(names)
    if name.lower() in [known.lower() for known in names]:
        return
    if name.lower() in FLOATS:
        raise wrong(
            flag,
            f"{name!r} is a type of floats, not a scheme. Layers stay in float with "
            "--exclude_layers; --data_type is the type of the model.",
        )
    if name.lower() in ALGO_CONFIGS:
        example = f"--quant_scheme int4_wo_128 --quant_algo {name.lower()}"
        raise wrong(flag, f"{name!r} is an algorithm, not a scheme. Give both, such as {example}.")
    stem, _, algorithm = name.lower().rpartition("_")
    near = similar_scheme(stem if algorithm in ALGO_CONFIGS else name, names)
    if near and algorithm in ALGO_CONFIGS:
        example = f"--quant_scheme {near} --quant_algo {algorithm}"
        raise wrong(flag, f"{name!r} is a scheme and an algorithm. Give {example}.")
    hint = f"Did you mean {near!r}? " if near else ""
    raise wrong(flag, f"{name!r} is unknown. {hint}'quark schemes --all' lists all names.")
