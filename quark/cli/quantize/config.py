"""Configurations from what is said on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli.console import wrong
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.config.algo import AlgoConfig
    from quark.torch.quantization.config.config import Config, QuantizationConfig
    from quark.torch.quantization.config.spec import QuantizationSpec


def make_config(request: Request, model_type: str) -> Config:
    """Return the configuration that was asked for, still without the output head excluded.

    Raises:
        typer.BadParameter: A name is unknown, or flags do not fit the schemes.
    """
    if request.recipe is not None:
        request = replace(request, quant_scheme=_recipe(request.recipe)[0])
    config = _from_file(request.config) if request.config else _from_schemes(request, model_type)
    check_algorithms(config)
    if request.statistics is not None:
        _check_statistics(config)
    if "onnx" in request.exports:
        _check_graph(config)
    if request.weight_matrix_merge and not any(_shares(layer) for layer in layer_configs(config)):
        raise wrong(
            "--weight_matrix_merge",
            "only per-tensor scales of symmetric weights can be shared, and there are none here.",
        )
    return config


def _check_statistics(config: Config) -> None:
    from quark.torch.quantization import calibration as calibrate
    from quark.torch.quantization.api import check_from_statistics, find_algorithms

    try:
        is_static = calibrate.needs_data(layer_configs(config))
        check_from_statistics(find_algorithms(config), is_static)
    except ValueError as error:
        raise wrong("--statistics", str(error)) from None


def _check_graph(config: Config) -> None:
    from quark.torch.export.onnx.writer import check_config

    try:
        for layer in layer_configs(config):
            check_config(layer, "what is asked for")
    except ValueError as error:
        raise wrong("--model_export", str(error)) from None


def layer_configs(config: Config) -> Iterator[QuantizationConfig]:
    """Iterate over all layer configurations of a configuration."""
    yield config.global_quant_config
    for by_name in (config.layer_quant_config, config.kv_cache_quant_config):
        yield from by_name.values()
    yield from config.layer_type_quant_config.values()


def needs_data(config: Config, has_statistics: bool = False) -> bool:
    """Whether a configuration has algorithms or ranges that need data.

    Args:
        config: The configuration.
        has_statistics: Whether they have statistics instead, as far as these go.
    """
    from quark.torch.quantization import calibration as calibrate
    from quark.torch.quantization.api import find_algorithms, ranges_from_statistics

    algorithms, layers = find_algorithms(config), list(layer_configs(config))
    if has_statistics and ranges_from_statistics(config, algorithms, layers):
        return False
    learns = any(algorithm.needs_data(options) for algorithm, options in algorithms)
    return (learns and not has_statistics) or calibrate.needs_data(layers)


def _shares(layer: QuantizationConfig) -> bool:
    from quark.torch.quantization.config.type import QSchemeType

    spec = layer.weight
    return spec is not None and spec.qscheme is QSchemeType.per_tensor and spec.scheme.symmetric


def _from_file(path: Path) -> Config:
    from quark.torch.export.checkpoint.files import read_json
    from quark.torch.quantization.config.config import Config

    if not path.is_file():
        raise wrong("--config", f"there is no file {path}.")
    try:
        data = read_json(path)
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, got {type(data).__name__}.")
        return Config.from_dict(data)
    except (TypeError, ValueError) as error:
        raise wrong("--config", f"{path} is not a Config: {error}") from None


def _from_schemes(request: Request, model_type: str) -> Config:
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.config.presets import KV_CACHE_SCHEMES
    from quark.torch.quantization.config.template import LLMTemplate, with_kv_cache

    if request.kv_cache_dtype is not None:
        check_name("--kv_cache_dtype", request.kv_cache_dtype, KV_CACHE_SCHEMES)
    assert request.quant_scheme is not None
    main, size = request.quant_scheme, request.group_size
    whole = layer_scheme("--quant_scheme", main, size)
    layers = {p: layer_scheme("--quant_scheme", main, n) for p, n in request.layer_group_sizes}
    for pattern, name in request.layer_schemes:
        layers.setdefault(pattern, layer_scheme("--layer_quant_scheme", name, size))
    _check_sizes(request, main)
    _check_scales(request, [whole, *layers.values()])
    config = Config(
        global_quant_config=_with_scales(whole, request),
        layer_quant_config={p: _with_scales(layer, request) for p, layer in layers.items()},
        exclude=request.excluded or [],
        algo_config=_algorithms(request),
    )
    if request.kv_cache_dtype is not None:
        projections = LLMTemplate.get(model_type).kv_layers_name
        floor = request.min_kv_scale or 0.0
        config = with_kv_cache(config, projections, request.kv_cache_dtype, floor)
        config = replace(config, kv_cache_post_rope=request.kv_cache_post_rope)
    return config


def _check_sizes(request: Request, main: str) -> None:
    """Check that there are groups to take the sizes that are given."""
    names = [main, *(name for _, name in request.layer_schemes)]
    sized = [name for name in names if _is_sized(name)]
    fits = {"group_size": bool(sized), "group_size_per_layer": main in sized}
    for flag, fit in fits.items():
        if getattr(request, flag) is not None and not fit:
            raise wrong(
                f"--{flag}", f"{main} has no groups, or names their size itself. Leave it out."
            )


# Field of a specification that a flag gives -> whether a specification leaves it open.
_SCALE_FIELDS: dict[str, Callable[[QuantizationSpec], bool]] = {
    "scale_format": lambda spec: spec.scale_format == "float32" and spec.second_stage is None,
    "scale_calculation_mode": lambda spec: spec.scale_calculation_mode is not None,
}


def _check_scales(request: Request, layers: list[QuantizationConfig]) -> None:
    """Check that scales that are asked for on the command line are those of some tensor."""
    specs = [spec for layer in layers for _, spec in layer.specs()]
    for flag, is_open in _SCALE_FIELDS.items():
        if flag in request.given and not any(map(is_open, specs)):
            raise wrong(f"--{flag}", f"{request.quant_scheme} leaves no choice. Leave it out.")


def _with_scales(layer: QuantizationConfig, request: Request) -> QuantizationConfig:
    """Return the configuration of a layer with the scales that are asked for."""
    for flag, is_open in _SCALE_FIELDS.items():
        value = getattr(request, flag)
        if value is not None:
            specs: dict[str, Any] = {
                n: replace(s, **{flag: value}) for n, s in layer.specs() if is_open(s)
            }
            layer = replace(layer, **specs)
    return layer


def _algorithms(request: Request) -> list[AlgoConfig]:
    """Return the options of the algorithms that were asked for, in order."""
    from quark.torch.quantization.config.template import algorithms

    if request.recipe is not None:
        return _recipe(request.recipe)[1]
    given = _algorithm_files(request)
    try:
        found = algorithms(request.algorithms, given)
    except ValueError as error:
        raise wrong("--quant_algo", str(error)) from None
    for name in given.keys() - {options.name for options in found}:
        raise wrong(
            "--quant_algo_config_file", f"{name} is not asked for. Add --quant_algo {name}."
        )
    return found


def _recipe(name: str) -> tuple[str, list[AlgoConfig]]:
    from quark.torch.quantization.config.recipes import recipe

    try:
        return recipe(name)
    except ValueError as error:
        raise wrong("--recipe", str(error)) from None


def _algorithm_files(request: Request) -> dict[str, AlgoConfig]:
    """Return the options that files hold, by the name of the algorithm.

    Files come as ``FILE``, ``NAME=FILE`` or ``NAME FILE``.
    """
    from quark.torch.quantization.config.algo import load_quant_algo_config_from_file
    from quark.torch.quantization.config.template import algorithms

    flag, given = "--quant_algo_config_file", {}
    name: str | None = None
    for value in request.quant_algo_config_file or []:
        path = value
        if name is None and not Path(value).is_file():
            name, _, path = value.partition("=")
        if not path:
            continue  # its file comes next
        if not Path(path).is_file():
            raise wrong(flag, f"there is no file {path}.")
        try:
            expected = algorithms(name, {})
            options = load_quant_algo_config_from_file(path)
        except ValueError as error:
            raise wrong(flag, str(error)) from None
        if expected and expected[0].name != options.name:
            raise wrong(flag, f"{path} has the options of {options.name}, not of {name}.")
        given[options.name], name = options, None
    if name is not None:
        raise wrong(flag, f"there is no file {name!r}.")
    return given


def check_algorithms(config: Config) -> None:
    """Check that every algorithm is there and serves some layer of the configuration.

    Raises:
        typer.BadParameter: One is not, or does not.
    """
    from quark.torch.quantization.api import find_algorithms

    layers = {str(number): layer for number, layer in enumerate(layer_configs(config))}
    try:
        for algorithm, options in find_algorithms(config):
            algorithm.check(options, layers)
    except ValueError as error:
        raise wrong("--quant_algo", str(error)) from None


def layer_scheme(flag: str, name: str, group_size: int | None = None) -> QuantizationConfig:
    """Return what a scheme stands for.

    Raises:
        typer.BadParameter: There is none of that name; the nearest one is named.
    """
    from quark.torch.quantization.config import presets

    try:
        return presets.scheme(name, group_size or presets.GROUP_SIZE)
    except ValueError as error:
        check_name(flag, name, presets.scheme_names())
        raise wrong(flag, str(error)) from None


def _is_sized(name: str) -> bool:
    """Whether a scheme takes its group size from the caller."""
    return layer_scheme("", name, 32) != layer_scheme("", name, 64)


def check_name(flag: str, name: str, names: Iterable[str]) -> None:
    """Check that a name is one of those known, whatever its case.

    Raises:
        typer.BadParameter: It is not; the nearest one is named.
    """
    from quark.torch.quantization.config.name_lookup import nearest

    names = list(names)
    if name.lower() in [known.lower() for known in names]:
        return
    near = nearest(name, names, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise wrong(flag, f"{name!r} is unknown. {hint}'quark schemes' lists all names.")


def excluding_head(config: Config, model: nn.Module) -> Config:
    """Return the configuration with the output head of the model excluded, whatever its name."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    names = [name for name, module in model.named_modules() if head is not None and module is head]
    return replace(config, exclude=[*names, *config.exclude])
