"""The work of ``quark quantize``, step by step."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from quark.cli import console, models
from quark.cli.configs import excluding_head, make_config, needs_data
from quark.cli.options import EVAL_WINDOWS, GGUF_NAME, SEQ_LEN
from quark.cli.outline import Outcome, show_outcome, show_plan
from quark.cli.request import Request, check_flags, check_places

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.quantization.config.config import Config


def run(request: Request) -> None:
    """Quantize, evaluate and write a model, as asked for.

    Raises:
        typer.BadParameter: What was asked for cannot be done; found before the model is loaded.
        ValueError: The model cannot be quantized like that. Nothing is written.
    """
    check_places(request)
    check_flags(request)
    described = models.read_config(request.model_dir, "--model_dir")
    if "quantization_config" in described:
        raise console.wrong(
            "--model_dir", f"{request.model_dir} is quantized already. Give the float model."
        )
    config = make_config(request, str(described.get("model_type", "")))
    device = models.pick_device(request.device)
    length = models.window_length(described, request.seq_len, SEQ_LEN)
    show_plan(request, config, described, length)
    tokenizer, calibration, evaluation = _read_text(request, config, length)
    with console.stage("loading the model", spinner=True):
        model = models.load_model(
            request.model_dir, request.data_type, device, request.trust_remote_code
        )
    outcome = _work(request, model, config, calibration, evaluation)
    with console.stage("writing the checkpoint"):
        _export(request, model, tokenizer)
    show_outcome(request, outcome)


def _read_text(
    request: Request, config: Config, length: int
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Return tokenizer, windows to calibrate on and windows to evaluate on, where needed."""
    is_calibrated = needs_data(config)
    trust = request.trust_remote_code
    if not is_calibrated and request.skip_evaluation:
        try:  # only to be written beside the model
            return models.load_tokenizer(request.model_dir, "--model_dir", trust), None, None
        except typer.BadParameter:
            return None, None, None
    calibration = evaluation = None
    with console.stage("reading text"):
        tokenizer = models.load_tokenizer(request.model_dir, "--model_dir", trust)
        if is_calibrated:
            calibration = models.text_windows(
                request.dataset, "--dataset", tokenizer, length, request.num_calib_data, False
            )
        if not request.skip_evaluation:
            limit = request.num_eval_data or EVAL_WINDOWS
            evaluation = models.text_windows(
                request.eval_data, "--eval_data", tokenizer, length, limit, True
            )
    return tokenizer, calibration, evaluation


def _work(
    request: Request,
    model: nn.Module,
    config: Config,
    calibration: torch.Tensor | None,
    evaluation: torch.Tensor | None,
) -> Outcome:
    """Quantize and freeze the model in place, and measure it before and after."""
    import torch

    from quark.torch.quantization.api import ModelQuantizer
    from quark.torch.quantization.config.config import NAMED_ONLY
    from quark.torch.quantization.config.match import assign
    from quark.torch.quantization.nn.operators import is_operator

    if request.config is None and request.exclude_layers is None:
        config = excluding_head(config, model)
    _check_cache(model, config)
    if request.weight_matrix_merge:
        config = replace(config, shared_scale_groups=_siblings(model))
    kinds = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    chosen = assign(kinds, config)
    outcome = Outcome(
        linears=sum(n in chosen or kind not in NAMED_ONLY for n, kind in kinds.items()),
        seconds=0.0,
        shared=len(config.shared_scale_groups),
    )
    if evaluation is not None:
        outcome.before = _perplexity(model, evaluation, "perplexity of the original")
    batches = None if calibration is None else [*torch.split(calibration, request.batch_size)]
    start = time.monotonic()
    with console.stage("quantizing"):
        model = ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, batches))
    outcome.seconds = time.monotonic() - start
    if evaluation is not None:
        outcome.after = _perplexity(model, evaluation, "perplexity when quantized")
    return outcome


def _check_cache(model: nn.Module, config: Config) -> None:
    from quark.torch.quantization.config.match import matches

    patterns = list(config.kv_cache_quant_config)
    names = [name for name, _ in model.named_modules()]
    if patterns and not any(matches(name, patterns) for name in names):
        raise console.wrong(
            "--kv_cache_dtype",
            f"{type(model).__name__} has no layers that match {' or '.join(patterns)}. Leave it "
            "out, or name the layers in a Config and give --config.",
        )


def _siblings(model: nn.Module) -> list[list[str]]:
    import torch

    from quark.torch.graph.siblings import same_input_groups
    from quark.torch.pipeline.inference import run_batch

    batch = torch.ones(1, 8, dtype=torch.int64)
    groups = same_input_groups(model, lambda: run_batch(model, batch))
    if not groups:
        raise console.wrong("--weight_matrix_merge", "no layers of this model read the same input.")
    return groups


def _perplexity(model: nn.Module, windows: torch.Tensor, title: str) -> float:
    from quark.torch.evaluation.perplexity import perplexity

    with console.stage(title):
        return perplexity(model, windows, progress=title)


def _export(request: Request, model: nn.Module, tokenizer: Any) -> None:
    from quark.torch.export.api import ModelExporter
    from quark.torch.quantization.config.export import JsonExporterConfig

    options = JsonExporterConfig(
        weight_format=request.export_weight_format, pack_method=request.pack_method
    )
    exporter = ModelExporter(options, request.output_dir, request.overwrite)
    mode = request.custom_mode
    if request.model_export == "gguf":
        exporter.export_gguf_model(model, request.model_dir, GGUF_NAME)
    elif request.model_export == "quark_format":
        exporter.export_quark_model(model, custom_mode=mode)
    else:
        exporter.export_safetensors_model(model, custom_mode=mode, tokenizer=tokenizer)
