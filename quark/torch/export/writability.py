"""Check that a quantized model can be written, before the float model is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from torch import nn

from quark.torch.export.checkpoint.header_checks import tied_names
from quark.torch.export.checkpoint.reader import outline_of
from quark.torch.export.containers.base import ExportSettings, get_container
from quark.torch.export.formats.base import get_format
from quark.torch.files import check_space, check_vacant, size_of
from quark.torch.quantization.checks import temporarily_quantized
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.model_shape import selected

OWN = "quark"  # the format that holds everything; other containers take about as many bytes


def check_exports(
    model: nn.Module,
    config: Config | None,
    directory: str | Path,
    exports: Mapping[str, ExportSettings],
    overwrite: bool = False,
) -> None:
    """Check that a model can be written: a float model once it is quantized, without doing that.

    Args:
        model: The model. It is unchanged afterwards.
        config: How it will be quantized; None for a quantized and frozen model.
        directory: Directory that will be written.
        exports: Name of a container, one of ``CONTAINERS`` -> settings of its export.
        overwrite: Whether a directory with an earlier output may be replaced.

    Raises:
        ImportError: A package is missing.
        OSError: The directory is in use or cannot be written, or the disk has too little room.
        ValueError: The configuration does not fit the model, or a container cannot hold it.
    """
    check_vacant(directory, overwrite)
    for name in exports:
        get_container(name).check_installed()
    with nullcontext() if config is None else temporarily_quantized(model, config):
        for name, settings in exports.items():
            get_container(name).check_in_memory(model)
            get_container(name).check_writable(model, settings)
    if config is None:
        size = len(exports) * size_of(model.state_dict())
    else:
        modes = [s.custom_mode if get_container(n).has_formats else OWN for n, s in exports.items()]
        options = [settings.options for settings in exports.values()]
        size = sum(map(partial(stored_size, model, config), options, modes))
    check_space(directory, size)


def stored_size(
    model: nn.Module,
    config: Config,
    options: JsonExporterConfig | None = None,
    mode: str = OWN,
) -> int:
    """Return the bytes of the tensors of a checkpoint.

    Args:
        model: The float model. It is unchanged afterwards.
        config: How it will be quantized.
        options: Options of the export, None for the defaults.
        mode: Checkpoint format, a name of ``FORMATS`` that can hold the layers.
    """
    with selected(model, config) as (resolved, layers):
        return selected_size(model, resolved, layers, options, mode)


def selected_size(
    model: nn.Module,
    config: Config,
    layers: Mapping[str, QuantizationConfig],
    options: JsonExporterConfig | None = None,
    mode: str = OWN,
) -> int:
    """Return the result of ``stored_size`` for layers that ``selected`` has chosen, inside of it.

    Args:
        model: The float model.
        config: The configuration that ``selected`` has resolved.
        layers: Configuration of each layer to quantize.
        options: Options of the export, None for the defaults.
        mode: Checkpoint format, a name of ``FORMATS`` that can hold the layers.
    """
    fmt = get_format(mode, config, options or JsonExporterConfig())
    tensors, tied = outline_of(model, fmt, layers), tied_names(model)
    return size_of({name: tensor for name, tensor in tensors.items() if name not in tied})
