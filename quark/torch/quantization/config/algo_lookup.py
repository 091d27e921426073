"""Options of algorithms from their documented names, from plain JSON types and from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.torch.quantization.config.algo import ALGO_CONFIGS, AlgoConfig, present_options
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.serialize import path_of
from quark.torch.quantization.config.value_types import check_fields, check_types

_ALIASES = {"smoothquant": "smooth"}
_LISTS = ("scaling_layers", "inside_layer_modules", "exclude_patterns")


def algo_config_from_dict(data: dict[str, Any]) -> AlgoConfig:
    """Return the options of the algorithm that ``data["name"]`` names.

    Args:
        data: Name and options, as in a documented file.

    Raises:
        ValueError: The name is missing, or the name or an option is unknown.
    """
    if not isinstance(data, dict) or "name" not in data:
        raise ValueError(f"An algorithm needs a name: one of {', '.join(ALGO_CONFIGS)}.")
    name = one_of(str(data["name"]), ALGO_CONFIGS, "algorithm")
    cls = ALGO_CONFIGS[name]
    options = present_options(data, cls, f"option of algorithm {name!r}")
    # Files write null for an empty list.
    options = {key: v for key, v in options.items() if v is not None or key not in _LISTS}
    check_fields(options, cls, name)
    with path_of(name):
        return cls(**{**options, "name": name})


def make_algo_configs(
    names: str | list[str] | None, given: Mapping[str, AlgoConfig]
) -> list[AlgoConfig]:
    """Return the options of algorithms by their documented names, in order.

    Args:
        names: Name or names; ``smoothquant`` is another name of ``smooth``.
        given: Options by name, instead of the default ones.

    Raises:
        TypeError: Options are not of the class of their algorithm.
        ValueError: A name is unknown; the message names the nearest.
    """
    check_types(str | list[str] | None, algorithm=names)
    check_types(Mapping[str, Any], algo_configs=given)
    options_of = {}
    for name, options in given.items():
        key = _present_name(name, "algo_configs")
        if type(options) is not ALGO_CONFIGS[key]:
            kind = "class" if isinstance(options, type) else type(options).__name__
            raise TypeError(
                f"algo_configs: the options of {name} are a {kind}: give "
                f"{ALGO_CONFIGS[key].__name__}(…)."
            )
        options_of[key] = options
    wanted = [names] if isinstance(names, str) else names or []
    keys = [_present_name(name, "algorithm") for name in wanted]
    return [options_of.get(key) or ALGO_CONFIGS[key]() for key in keys]


def _present_name(name: str, what: str) -> str:
    """Return the name of an algorithm in ``ALGO_CONFIGS``."""
    key = one_of(name, [*ALGO_CONFIGS, *_ALIASES], what)
    return _ALIASES.get(key, key)


def load_quant_algo_config_from_file(file_path: str | Path, name: str | None = None) -> AlgoConfig:
    """Read the options of one algorithm from a JSON file.

    Args:
        file_path: File with one JSON object: the name of the algorithm and its options.
        name: The algorithm, if the file does not name it.

    Raises:
        ValueError: The file is not a JSON object, or a name or option is unknown.
    """
    from quark.torch.files import (
        parse_json,  # imports torch, which the names of options do not need
    )

    data = parse_json(Path(file_path).read_bytes(), file_path)
    if not isinstance(data, dict):
        raise ValueError(f"{file_path}: expected one JSON object, got {type(data).__name__}.")
    with path_of(str(file_path)):
        return algo_config_from_dict(data if name is None else {"name": name, **data})


def load_pre_optimization_config_from_file(file_path: str | Path) -> AlgoConfig:
    """Read the options of an algorithm; the same as ``load_quant_algo_config_from_file``."""
    return load_quant_algo_config_from_file(file_path)
