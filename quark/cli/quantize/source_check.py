"""Check of the files that ``quark quantize`` reads a model from, before any text is read."""

from __future__ import annotations

from typing import Any

from quark.cli import models
from quark.cli.quantize.file_job import is_known_architecture
from quark.cli.quantize.request import Request


def check_source(request: Request, described: dict[str, Any]) -> None:
    """Check the headers of the model that will be loaded, and its digests if that was asked for.

    Args:
        request: The flags.
        described: Contents of the ``config.json`` of the model.

    Raises:
        typer.BadParameter: A file is missing, damaged or not readable; or a model that will be
            dequantized is quantized by a method that is not read.
    """
    source = request.reload_dir if request.model_reload else request.model_dir
    if request.model_reload:
        models.read_config(source, "--import_model_dir")
    elif request.quantizes:
        models.check_method(source, described, "--model_dir")
    if request.params_load:
        _check_params(request)
    elif request.quantizes and not is_known_architecture(request, described):
        models.check_files(source, request.check_digests)
    else:
        models.check_model(source, request.trust_remote_code, request.check_digests)


def _check_params(request: Request) -> None:
    """Compare the files of ``--params_load`` with their digests, if that was asked for."""
    from quark.torch.export.params import check_params_unchanged

    assert request.json_path is not None
    assert request.safetensors_path is not None
    if request.check_digests:
        check_params_unchanged(request.json_path, request.safetensors_path)
