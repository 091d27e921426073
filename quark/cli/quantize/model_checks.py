"""Checks of flags of ``quark quantize`` that need the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    from torch import nn

    from quark.cli.quantize.request import Request
    from quark.torch.quantization.config.config import Config


def check_outputs(model: nn.Module, config: Config) -> None:
    """Check that the model has the layers whose outputs are keys, values and queries.

    Raises:
        typer.BadParameter: It has none.
    """
    from quark.torch.quantization.config.match import matches

    patterns = list(config.kv_cache_quant_config)
    names = [name for name, _ in model.named_modules()]
    if patterns and not any(matches(name, patterns) for name in names):
        raise console.wrong(
            "--kv_cache_dtype",
            f"{type(model).__name__} has no layers that match {' or '.join(patterns)}. Leave it "
            "out, or give a Config that names the layers with --config.",
        )
    spec = config.softmax_quant_spec
    layers = config.layer_quant_config.items()
    patterns = [p for p, layer in layers if layer.output_tensors == spec and p not in patterns]
    if spec is not None and patterns and not any(matches(name, patterns) for name in names):
        raise console.wrong(
            "--attention_scheme",
            f"{type(model).__name__} has no layers that match {' or '.join(patterns)}, which "
            "compute queries. Leave it out, or give a Config that names them with --config.",
        )


def check_layout(request: Request, model: nn.Module, config: Config) -> None:
    """Check that the layout of the checkpoint can hold what will be quantized.

    Args:
        request: The flags.
        model: The float model on the meta device. Its parameters become zeros without memory.
        config: How it will be quantized.

    Raises:
        typer.BadParameter: It cannot.
    """
    from quark.torch.export.checkpoint.float_source import fill_with_placeholders
    from quark.torch.export.checkpoint.writer import make_format
    from quark.torch.quantization.checks import temporarily_quantized
    from quark.torch.quantization.config.export import JsonExporterConfig

    if "hf_format" not in request.exports or request.custom_mode == "quark":
        return
    options = JsonExporterConfig(weight_format=request.export_weight_format)
    fill_with_placeholders(model)
    try:
        with temporarily_quantized(model, config):
            make_format(model, None, options, request.custom_mode)
    except ValueError as error:
        raise console.wrong("--custom_mode", str(error)) from None


def check_shared_inputs(model: nn.Module) -> None:
    """Check that layers of the model share an input, and so can share scales.

    Raises:
        typer.BadParameter: None do.
    """
    import torch

    from quark.torch.graph.shared_inputs import same_input_groups
    from quark.torch.pipeline.batches import run_batch

    batch = torch.ones(1, 8, dtype=torch.int64)
    if not same_input_groups(model, lambda: run_batch(model, batch)):
        raise console.wrong("--weight_matrix_merge", "no layers of this model share an input.")
