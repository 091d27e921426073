"""The job of ``quark quantize`` where the model is not loaded: from files to files."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.cli import accelerators, console
from quark.cli.quantize.card import CardFacts
from quark.cli.quantize.output import export_settings
from quark.cli.quantize.request import Request
from quark.cli.quantize.tables import Outcome

if TYPE_CHECKING:
    from quark.torch.quantization.config.config import Config


def is_known_architecture(request: Request, described: dict[str, Any]) -> bool:
    """Whether Transformers can build the model of a request.

    Args:
        request: The flags.
        described: Contents of its ``config.json``.
    """
    from quark.torch.export.checkpoint.stored_model import is_known

    is_remote = request.trust_remote_code and "auto_map" in described
    has_files = any(request.model_dir.glob("*.safetensors"))
    return is_remote or not has_files or is_known(described)


def goes_through_files(request: Request, described: dict[str, Any], config: Config) -> bool:
    """Whether a request is quantized from files to files: it asks for that, or nothing needs more.

    Raises:
        typer.BadParameter: The request asks for it, or Transformers does not know the architecture,
            and something needs a model in memory.
    """
    problem = _needs_model(request, config)
    if not is_known_architecture(request, described):
        if described.get("quantization_config"):
            problem = problem or "the source is quantized"
        problem = problem or ("" if request.skip_evaluation else "give --skip_evaluation")
        if problem:
            raise console.wrong("--model_dir", _unknown_architecture(described, problem))
        return True
    if request.flow == "file2file" and problem:
        flag = "quant_flow" if request.quant_flow else "file2file_quantization"
        raise console.wrong(f"--{flag}", f"{problem}. Leave it out.")
    if request.flow is None:
        return not problem and request.skip_evaluation
    return request.flow == "file2file"


def _unknown_architecture(described: dict[str, Any], problem: str) -> str:
    """Return the message for a model that Transformers cannot load, and files do not suffice."""
    if described.get("model_type") is None:
        return "its config.json lacks model_type. Copy config.json from the original model."
    remedy = "A later version may know it: pip install --upgrade transformers"
    if "auto_map" in described:
        remedy = "If you trust the Python code in its directory, give --trust_remote_code."
    return (
        f"Transformers does not know the architecture {described['model_type']!r}, so the model is "
        f"only quantized from files to files: {problem}. {remedy}"
    )


def _needs_model(request: Request, config: Config) -> str:
    """Return why a request needs the model in memory, "" if it does not."""
    from quark.torch.export.file_to_file import needs_model

    if problem := needs_model(config):
        return f"{problem}, so it needs the model in memory"
    if not any(request.model_dir.glob("*.safetensors")):
        return f"{request.model_dir} has no safetensors"
    if request.exports != ["hf_format"]:
        return "only hf_format is written without a model in memory"
    for name in ("params_save", "verify", "weight_matrix_merge", "finish"):
        if getattr(request, name):
            return f"--{name} needs the model in memory"
    return "--data_type needs the model in memory" if request.data_type != "auto" else ""


def quantize_files(
    request: Request,
    described: dict[str, Any],
    config: Config,
    tokenizer: Any,
    card: CardFacts,
    announce: Callable[[Path], None] | None = None,
) -> Outcome:
    """Quantize the files of a request, write the output, and return the figures.

    Args:
        request: The flags.
        described: Contents of the ``config.json`` of the model.
        config: How to quantize it.
        tokenizer: Its tokenizer, or None.
        card: Facts of the model card.
        announce: Called with the output when it is complete, before it takes its place.
    """
    import torch

    from quark.torch.export.containers.safetensors import CopiedFiles
    from quark.torch.export.file_to_file import quantize_files
    from quark.torch.numerics.native.memory import spare_memory

    settings = replace(export_settings(request, tokenizer), announce=announce)
    if not is_known_architecture(request, described):
        settings = replace(settings, tokenizer=CopiedFiles(request.model_dir))
    settings = replace(settings, card=card.write)
    outcome = Outcome()
    start = time.monotonic()
    spares = nullcontext() if request.max_memory is None else spare_memory()
    with console.stage("quantizing"), spares:
        model = quantize_files(
            config,
            request.model_dir,
            request.output_dir,
            settings,
            request.overwrite,
            trust_remote_code=request.trust_remote_code,
            devices=[torch.device(name) for name in accelerators.pick_devices(request.device)],
        )
    outcome.seconds = time.monotonic() - start
    outcome.count_layers(model)
    return outcome
