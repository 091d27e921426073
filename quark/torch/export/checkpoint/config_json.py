"""``config.json`` of a checkpoint, with the settings that older tools wrote to other files.

AutoGPTQ wrote its settings to ``quantize_config.json`` alone, AutoAWQ to ``quant_config.json``,
ModelOpt to ``hf_quant_config.json``. MLX writes them to ``config.json`` as ``quantization``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quark.torch.export.checkpoint.auto_round import AUTO_ROUND, read_auto_round
from quark.torch.files import read_json, write_json

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config

Model = TypeVar("Model")

CONFIG, SECTION, MLX_SECTION = "config.json", "quantization_config", "quantization"
ALGORITHMS = "quantization_algorithms"
# Notes of the calibration beside the section -> their values: the digest of the data, the type in
# which 16-bit floats were multiplied if it is not their own, the shares of scripts in its text, and
# names of algorithms, for formats whose section does not have them.
_NOTES = {
    "calibration_sha256": "[0-9a-f]{64}",
    "calibration_products": "float32",
    ALGORITHMS: "[a-z0-9_]+(, [a-z0-9_]+)*",
    "calibration_scripts": r"[A-Z][a-z]+ [01]\.\d{4}(, [A-Z][a-z]+ [01]\.\d{4})*",
}
# File with settings -> quant_method, which the file does not name.
SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # of AutoAWQ -> here
_COMPARED = (
    *("quant_method", "bits", "group_size", "sym", "zero_point", "checkpoint_format"),
    *("quant_algo", "ignore", "quantized_layers"),
)
_FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}  # of ModelOpt


def read_config_json(directory: str | Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint, with the quantization settings of other files.

    Args:
        directory: Directory of a model, quantized or not.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: A file is damaged, or two of them disagree.
    """
    path = Path(directory) / CONFIG
    config = _with_mlx_section(_read_object(path))
    section = config.get(SECTION)
    if isinstance(section, dict) and section.get("quant_method") == AUTO_ROUND:
        config = {**config, SECTION: read_auto_round(section)}
    for name, method in SETTINGS_FILES.items():
        if not (path.parent / name).is_file():
            continue
        settings = _read_object(path.parent / name)
        if method == "modelopt":
            settings = _modelopt_settings(settings, path.parent / name)
        settings = {_NAMES.get(k, k): value for k, value in settings.items() if value is not None}
        section = config.get(SECTION)
        if section is None:
            config[SECTION] = {"quant_method": method, **settings}
        elif isinstance(section, dict):
            _check_agreement(section, settings, path.parent, name)
    return config


def _with_mlx_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` whose section names MLX, if its settings are those of MLX."""
    given, section = config.get(MLX_SECTION), config.get(SECTION)
    is_named = isinstance(section, dict) and "quant_method" in section
    if not isinstance(given, dict) or "group_size" not in given or is_named:
        return config
    return {**config, SECTION: {**given, "quant_method": "mlx"}}


def _modelopt_settings(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings of ``hf_quant_config.json`` under the names of ``config.json``."""
    given = data.get("quantization")
    if not isinstance(given, dict):
        raise ValueError(f"{path} does not describe a quantization: expected an object.")
    cache = given.get("kv_cache_quant_algo")
    return {
        "group_size": given.get("group_size"),
        "ignore": given.get("exclude_modules"),
        "kv_cache_scheme": dict(_FP8_CACHE) if cache == "FP8" else cache,
        "quant_algo": given.get("quant_algo"),
        "quantized_layers": given.get("quantized_layers"),
    }


def write_settings_file(section: Mapping[str, Any], directory: Path) -> None:
    """Write the settings that some readers of a format expect elsewhere.

    ModelOpt has a file of its own beside ``config.json``, MLX an object in it.

    Args:
        section: ``quantization_config``.
        directory: Directory of the checkpoint.
    """
    if section.get("quant_method") == "mlx":
        settings = {key: value for key, value in section.items() if key != "quant_method"}
        config = {**_read_object(directory / CONFIG), MLX_SECTION: settings}
        write_json(directory / CONFIG, dict(sorted(config.items())))  # as Transformers sorts it
    if section.get("quant_method") != "modelopt":
        return
    layers = section.get("quantized_layers")
    sizes = [group["weights"].get("group_size") for group in section["config_groups"].values()]
    settings = {
        "exclude_modules": section["ignore"],
        **({"quantized_layers": layers} if layers else {"group_size": sizes[0]}),
        "kv_cache_quant_algo": "FP8" if section["kv_cache_scheme"] else None,
        "quant_algo": section["quant_algo"],
    }
    content = {"producer": section["producer"], "quantization": settings}
    write_json(directory / "hf_quant_config.json", content)


def calibration_notes(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the notes of the calibration in a ``config.json``, by name."""
    values = {name: config.get(name) for name in _NOTES}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, str) and re.fullmatch(_NOTES[name], value)
    }


def notes_of(model: object) -> dict[str, str]:
    """Return the notes of the calibration of a model, by name."""
    return calibration_notes({name: getattr(model, name, None) for name in _NOTES})


def note_run(model: Any, config: Config, digest: str | None = None, widened: bool = False) -> None:
    """Let a model remember how it was quantized, for every format that it is written in.

    Args:
        model: The model.
        config: Its configuration, with the algorithms that ran.
        digest: SHA-256 of the calibration data, None without any.
        widened: Whether calibration multiplied 16-bit floats in float32.
    """
    names = ", ".join(options.name for options in config.algo_config or [])
    setattr(model, ALGORITHMS, names or "none")
    if digest is not None:
        model.calibration_sha256 = digest
        if widened:
            model.calibration_products = "float32"


def keep_notes(model: Model, config: Mapping[str, Any]) -> Model:
    """Give a model the notes of its calibration, which are written with it, and return it."""
    for name, value in calibration_notes(config).items():
        setattr(model, name, value)
    return model


def _read_object(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} does not describe a model: expected an object.")
    return data


def _check_agreement(
    section: dict[str, Any], settings: dict[str, Any], directory: Path, name: str
) -> None:
    """Raise if two files have different values for one setting."""
    for key in _COMPARED:
        if key in section and key in settings and section[key] != settings[key]:
            raise ValueError(
                f"{directory}: {SECTION} of {CONFIG} has {key}={section[key]!r}, but {name} has "
                f"{settings[key]!r}. Remove the one that is not true of the weights."
            )
