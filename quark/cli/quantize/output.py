"""The output of ``quark quantize``: checked before the work, kept if it cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer
from rich.markup import escape

from quark.cli import console
from quark.cli.outputs import check_room
from quark.cli.quantize.card import CardFacts
from quark.cli.quantize.data import ProcessorFiles
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.export.containers.base import ExportSettings
    from quark.torch.quantization.config.config import Config


def check_word_order(request: Request, config: Config) -> None:
    """Check that an order of codes that is given orders some.

    Args:
        request: The flags.
        config: How the model will be, or is, quantized.

    Raises:
        typer.BadParameter: No weight has codes with several orders.
    """
    from quark.torch.quantization.config.export import PACK_METHODS

    if request.pack_method == PACK_METHODS[0]:
        return
    by_name, by_type = config.layer_quant_config, config.layer_type_quant_config
    layers = [config.global_quant_config, *by_name.values(), *by_type.values()]
    weights = [spec for layer in layers for spec in (layer.weight, layer.bias) if spec is not None]
    if not any(spec.coded.fmt.has_word_orders for spec in weights):
        why = "only 4-bit integers in words of 32 bits have several orders, and no weight has them"
        raise console.wrong("--pack_method", f"{why}. Leave it out.")


def check_writable(request: Request, model: nn.Module, config: Config | None) -> None:
    """Check that a model can be written as requested, before it is quantized.

    Args:
        request: The flags.
        model: The model; it is unchanged afterwards.
        config: How it will be quantized; None for a model that is.

    Raises:
        ImportError: A package is missing.
        OSError: A directory cannot be written, or the disk has too little room.
        typer.BadParameter: The configuration does not fit the model, or a format cannot hold it.
    """
    from quark.torch.export.params import FLOAT_OPTIONS, check_params
    from quark.torch.export.writability import check_exports, stored_size
    from quark.torch.quantization.checks import temporarily_quantized

    if config is None and request.exports:
        check_word_order(request, cast("Config", model.quant_config))
    try:
        if request.exports:
            settings = export_settings(request, None)
            exports = dict.fromkeys(request.exports, settings)
            check_exports(model, config, request.output_dir, exports, request.overwrite)
        if request.params_save and config is not None:
            with temporarily_quantized(model, config):
                check_params(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if request.params_save and config is not None:
        check_room("--save_dir", request.save_dir, stored_size(model, config, FLOAT_OPTIONS))


def write(
    request: Request,
    model: nn.Module,
    tokenizer: Any,
    model_type: str,
    announce: Callable[[Path], None] | None = None,
    card: CardFacts | None = None,
) -> None:
    """Write the checkpoint and the parameters; a directory appears only when it is complete.

    Args:
        request: The flags.
        model: The model.
        tokenizer: Its tokenizer, or None.
        model_type: Name of the files of parameters.
        announce: Called with the directory of the checkpoint when it is complete, before it takes
            its place.
        card: What the model card tells; None for no card.

    Raises:
        OSError: Writing failed. The message names the directory that keeps the result instead.
    """
    try:
        _write_exports(request, model, tokenizer, announce, card)
        _write_params(request, model, model_type)
    except Exception as error:  # whatever it is, hours of work are kept
        is_quark = request.exports == ["hf_format"] and request.custom_mode == "quark"
        if request.verify and is_quark and isinstance(error, ValueError):
            raise  # the verification failed, and what would be kept is the same
        raise OSError(f"{error} {_keep(request, model, tokenizer)}") from error


def _write_exports(
    request: Request,
    model: nn.Module,
    tokenizer: Any,
    announce: Callable[[Path], None] | None,
    card: CardFacts | None,
) -> None:
    from quark.torch.files import fresh_directory

    formats = request.exports
    if not formats:
        return
    is_graph = list(formats) == ["onnx"]
    with console.stage("tracing and writing the graph" if is_graph else "writing the checkpoint"):
        if len(formats) == 1:
            _export(request, model, tokenizer, formats[0], request.output_dir, announce, card)
        else:
            target, overwrite = request.output_dir, request.overwrite
            with fresh_directory(target, overwrite, announce=announce) as directory:
                for name in formats:
                    _export(request, model, tokenizer, name, directory / name)
                    _move_up(directory / name)
                if card is not None:
                    card.write(directory)


def _write_params(request: Request, model: nn.Module, model_type: str) -> None:
    from quark.torch.export.params import save_params

    if request.params_save:
        with console.stage("writing parameters"):
            save_params(model, model_type, export_dir=request.save_dir, overwrite=request.overwrite)


def _keep(request: Request, model: nn.Module, tokenizer: Any) -> str:
    """Write the result in the Quark layout to a new directory beside; return what to tell."""
    from quark.torch.export.api import ModelExporter
    from quark.torch.export.containers.base import ExportSettings

    output = (request.output_dir if request.exports else request.save_dir).resolve()
    names = (output.with_name(f"{output.name}-kept{number or ''}") for number in count())
    place = next(path for path in names if not path.exists())
    files = ProcessorFiles(tokenizer, request.model_dir)
    try:
        ModelExporter(None, place).export("hf_format", model, ExportSettings(tokenizer=files))
    except Exception as error:  # told beside the first error, which is raised
        return f"The result could not be kept in {place} either: {error}"
    return (
        f"The result is kept in {place}, in the format quark: 'quark convert' writes it in another."
    )


def export_settings(request: Request, tokenizer: Any) -> ExportSettings:
    """Return the settings of the exports of a request."""
    from quark.torch.export.containers.base import ExportSettings
    from quark.torch.export.onnx.writer import OnnxOptions
    from quark.torch.quantization.config.export import JsonExporterConfig

    options = JsonExporterConfig(
        weight_format=request.export_weight_format, pack_method=request.pack_method
    )
    return ExportSettings(
        custom_mode=request.custom_mode,
        options=options,
        tokenizer=ProcessorFiles(tokenizer, request.model_dir),
        tokenizer_path=request.model_dir,
        graph=OnnxOptions(use_cache=request.use_cache),
    )


def _export(
    request: Request,
    model: nn.Module,
    tokenizer: Any,
    name: str,
    directory: Path,
    announce: Callable[[Path], None] | None = None,
    card: CardFacts | None = None,
) -> None:
    from quark.torch.export.api import ModelExporter

    settings = replace(
        export_settings(request, tokenizer),
        announce=announce,
        card=None if card is None else card.write,
    )
    exporter = ModelExporter(settings.options, directory, request.overwrite, request.verify)
    exporter.export(name, model, settings)
    if exporter.verdict is not None:
        console.out.print(f"  verified: {escape(str(exporter.verdict))}")


def _move_up(directory: Path) -> None:
    """Move the files of a directory to its parent, and remove the directory."""
    for file in directory.iterdir():
        file.replace(directory.parent / file.name)
    directory.rmdir()
