"""The options of the algorithms of ``quark quantize``, from its flags and files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark.cli.console import wrong
from quark.cli.other_names import ALGORITHMS
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from quark.torch.quantization.config.algo import AlgoConfig


def make_algorithms(request: Request) -> list[AlgoConfig]:
    """Return the options of the algorithms, in order."""
    from quark.torch.quantization.config.algo_lookup import make_algo_configs

    if request.recipe is not None:
        return find_recipe(request.recipe)[1]
    given = _read_files(request)
    for name in request.algorithms:
        if (meant := ALGORITHMS.get(name.lower())) is not None:
            raise wrong("--quant_algo", f"{name!r} is unknown. Give {meant}.")
    try:
        configs = make_algo_configs(request.algorithms, given)
    except ValueError as error:
        raise wrong("--quant_algo", str(error)) from None
    for name in given.keys() - {config.name for config in configs}:
        raise wrong("--quant_algo_config_file", f"{name} is not applied. Add --quant_algo {name}.")
    return configs


def find_recipe(name: str) -> tuple[str, list[AlgoConfig]]:
    """Return the scheme of a recipe and the options of its algorithms.

    Raises:
        typer.BadParameter: No recipe has that name; the message names the nearest, or the scheme
            that has it.
    """
    from quark.torch.quantization.config.algo import ALGO_CONFIGS
    from quark.torch.quantization.config.presets import scheme_names, similar_scheme
    from quark.torch.quantization.config.recipes import recipe

    try:
        return recipe(name)
    except ValueError as error:
        near = similar_scheme(name, scheme_names())
        hint = f" For a scheme without a recipe, give --quant_scheme {near}." if near else ""
        if name.lower() in ALGO_CONFIGS:
            hint = f" An algorithm needs a scheme: --quant_scheme int4_wo_128 --quant_algo {name}."
        raise wrong("--recipe", f"{str(error).removeprefix('recipe: ')}{hint}") from None


def _read_files(request: Request) -> dict[str, AlgoConfig]:
    """Return the options in the files, by the name of the algorithm.

    Files come as ``FILE``, ``NAME=FILE`` or ``NAME FILE``.
    """
    from quark.torch.quantization.config.algo_lookup import (
        load_quant_algo_config_from_file,
        make_algo_configs,
    )

    flag, given = "--quant_algo_config_file", {}
    name: str | None = None
    for value in request.quant_algo_config_file or []:
        path = value
        if name is None and not Path(value).is_file():
            name, _, path = value.partition("=")
        if not path:
            continue  # the next value is its file
        if not Path(path).is_file():
            raise wrong(flag, f"there is no file {path}.")
        try:
            expected = make_algo_configs(name, {})
            options = load_quant_algo_config_from_file(path, expected[0].name if expected else None)
        except ValueError as error:
            raise wrong(flag, str(error)) from None
        if expected and expected[0].name != options.name:
            raise wrong(flag, f"{path} has the options of {options.name}, not of {name}.")
        given[options.name], name = options, None
    if name is not None:
        inline = " Write this JSON to a file, and give its name." if name.startswith("{") else ""
        raise wrong(flag, f"there is no file {name!r}.{inline}")
    return given
