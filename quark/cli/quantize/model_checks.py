"""Checks of flags of ``quark quantize`` that need the model itself."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import typer

from quark.cli import console
from quark.cli.quantize.output import export_settings
from quark.cli.schemes import OWN_LAYOUT, schemes_of

if TYPE_CHECKING:
    from torch import nn

    from quark.cli.quantize.request import Request
    from quark.torch.export.containers.base import Container
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


def check_patterns(request: Request, model: nn.Module, config: Config) -> None:
    """Check that each pattern of a scheme or of a group size for layers decides about a layer.

    Patterns of ``--exclude_layers`` may match nothing, with a warning: lists of layers that stay in
    float serve models of several architectures.

    Args:
        request: The flags.
        model: The float model on the meta device.
        config: How it will be quantized.

    Raises:
        typer.BadParameter: A pattern matches no layer that can be quantized, or none that it
            decides about.
    """
    from quark.torch.quantization.config.match import matches
    from quark.torch.quantization.config.resolution import resolve_names
    from quark.torch.quantization.nn.experts import temporarily_split_experts
    from quark.torch.quantization.nn.operators import is_operator

    given = [("--group_size_per_layer", pattern) for pattern, _ in request.layer_group_sizes]
    given += [("--layer_quant_scheme", pattern) for pattern, _ in request.layer_schemes]
    if not given:
        return
    patterns = [pattern for _, pattern in given]
    with temporarily_split_experts(model):
        exclude = resolve_names(config, model).exclude
        layers = [name for name, module in model.named_modules() if is_operator(type(module))]
    for number, (flag, pattern) in enumerate(given):
        own = [name for name in layers if matches(name, [pattern])]
        if not own:
            raise console.wrong(flag, f"no layer matches {pattern!r}. {_nearest(pattern, layers)}")
        quantized = [name for name in own if not matches(name, exclude)]
        if not quantized:
            raise console.wrong(flag, f"{pattern!r}: {_in_float(request)}")
        earlier = patterns[:number]
        if all(matches(name, earlier) for name in quantized):
            first = next(other for other in earlier if matches(quantized[0], [other]))
            raise console.wrong(
                flag,
                f"{pattern!r} has no effect: {first!r} comes before and matches the same layers. "
                "The first match applies, group sizes before schemes. Leave one of them out.",
            )


def _nearest(pattern: str, layers: list[str]) -> str:
    """Return the sentence that names layers similar to a pattern."""
    from quark.torch.quantization.config.name_lookup import nearest

    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    near = nearest(pattern.strip("*"), [*endings, *layers])
    return f"Nearest: {', '.join(near)}." if near else f"Layers: {', '.join(endings[:8])}."


def _in_float(request: Request) -> str:
    """Return why layers stay in float, and what to give."""
    if request.excluded is not None:
        return "--exclude_layers keeps these layers in float. Leave one of them out."
    return (
        "these layers stay in float by default. Give --exclude_layers with the layers that are to "
        "stay in float, or without a value for none."
    )


def check_layout(request: Request, model: nn.Module, config: Config) -> None:
    """Check that every output can hold what will be quantized.

    Args:
        request: The flags.
        model: The float model on the meta device. Its parameters become zeros without memory.
        config: How it will be quantized.

    Raises:
        ImportError: A package is missing.
        typer.BadParameter: An output cannot; the message names a scheme that it can hold. Or the
            configuration does not fit the model.
    """
    from quark.torch.export.checkpoint.float_source import fill_with_placeholders
    from quark.torch.export.containers.base import get_container
    from quark.torch.quantization.checks import temporarily_quantized

    containers = [get_container(name) for name in request.exports]
    limited = [c for c in containers if not c.has_formats or request.custom_mode != OWN_LAYOUT]
    if not limited:
        return
    for container in limited:
        container.check_installed()
    if request.use_cache:
        _check_cache(model)
    fill_with_placeholders(model)
    try:
        with temporarily_quantized(model, config):
            for container in limited:
                _check_container(request, container, model)
    except ValueError as error:  # the configuration does not fit the model
        raise typer.BadParameter(str(error)) from None


def _check_cache(model: nn.Module) -> None:
    """Check that a decoder keeps keys and values, which are inputs of an ONNX file with a cache.

    Args:
        model: The model on the meta device. What it keeps shows without values, but for models
            whose steps depend on values; writing checks these.

    Raises:
        typer.BadParameter: It keeps something else, or nothing.
    """
    import torch

    from quark.torch.export.onnx.inputs import ModelInputs
    from quark.torch.graph.eval_mode import eval_mode

    ids = torch.arange(16)[None]
    try:
        with eval_mode(model), suppress(NotImplementedError, RuntimeError):
            ModelInputs.bind(model, {"input_ids": ids}, use_cache=True)
    except ValueError as error:
        raise console.wrong("--use_cache", str(error)) from None


def _check_container(request: Request, container: Container, model: nn.Module) -> None:
    """Check that an output can hold a quantized model.

    Raises:
        typer.BadParameter: It cannot.
    """
    try:
        container.check_writable(model, export_settings(request, None))
    except ValueError as error:
        flag = "--custom_mode" if container.has_formats else "--model_export"
        layout = request.custom_mode if container.has_formats else container.name
        raise console.wrong(flag, f"{error}{_example(request, layout)}") from None


def _example(request: Request, layout: str) -> str:
    """Return the sentence that names a scheme for a layout, other than the one that is given."""
    names = [name for name in schemes_of(layout) if name != request.quant_scheme]
    if request.quant_scheme is None or not names:
        return ""
    return f" It holds --quant_scheme {names[0]}, for example ('quark schemes' lists them)."


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
