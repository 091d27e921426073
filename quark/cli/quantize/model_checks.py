"""Checks of flags of ``quark quantize`` that need the model itself."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from quark.cli import console
from quark.cli.exclusions import check_exclusions, nearest_layers
from quark.cli.predicted_text import name_of_input, reads_text
from quark.cli.quantize.output import export_settings
from quark.cli.schemes import OWN_LAYOUT, schemes_of

if TYPE_CHECKING:
    from torch import nn

    from quark.cli.quantize.request import Request
    from quark.torch.export.containers.base import Container
    from quark.torch.quantization.config.config import Config

logger = logging.getLogger("quark")
_NAMED = 6  # layers of an output head that a message names


def check_outputs(model: nn.Module, config: Config) -> Config:
    """Check that the model has the layers whose outputs are keys, values and queries.

    It may not change its parameters while it runs either.

    Args:
        model: The float model, which may be on the meta device.
        config: How it will be quantized.

    Returns:
        The configuration with the layers that give keys and values in this model.

    Raises:
        typer.BadParameter: It has none, or those of keys and values give queries too, or a
            parameter changes.
    """
    from quark.torch.quantization.checks import check_cached_outputs, check_steady
    from quark.torch.quantization.nn.fused_layers import with_fused_layers

    spec = config.softmax_quant_spec
    layers = config.layer_quant_config.items()
    patterns = [
        pattern
        for pattern, layer in layers
        if layer.output_tensors == spec and pattern not in config.kv_cache_quant_config
    ]
    patterns = list(config.query_quant_config) if spec is None else patterns
    _check_names(
        "--attention_scheme",
        model,
        patterns,
        "queries alone, which it quantizes: quantize keys and values alone, by --kv_cache_dtype "
        "and --kv_cache_post_rope",
    )
    config = with_fused_layers(config, model)
    _check_names(
        "--attention_scheme" if config.query_quant_config else "--kv_cache_dtype",
        model,
        list(config.kv_cache_quant_config),
        "keys and values alone: add --kv_cache_post_rope",
    )
    try:
        check_cached_outputs(model, config)
        check_steady(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return config


def _check_names(flag: str, model: nn.Module, patterns: list[str], wanted: str) -> None:
    """Check that name patterns match a module, if there are any.

    Args:
        flag: The flag that they belong to.
        model: The float model.
        patterns: The patterns.
        wanted: What their layers would give, and what to do where layers give more.

    Raises:
        typer.BadParameter: They match none.
    """
    from quark.torch.quantization.config.match import matches
    from quark.torch.quantization.nn.fused_layers import fused_layers

    if not patterns or any(matches(name, patterns) for name, _ in model.named_modules()):
        return
    absent = f"{type(model).__name__} has no layers that match {' or '.join(patterns)}"
    if fused := fused_layers(model):
        raise console.wrong(
            flag,
            f"{absent}. {fused[0]} gives queries, keys and values together, not {wanted}.",
        )
    raise console.wrong(
        flag, f"{absent}. Leave it out, or give a Config that names the layers with --config."
    )


def check_patterns(request: Request, model: nn.Module, config: Config) -> Config:
    """Check that each pattern of layers matches one, and decides about it.

    A list of ``--exclude_layers`` replaces the default, so a misspelt name would quantize the
    output head: a name must match. Of several patterns with wildcards one must, and the others
    are warned of: such a list serves models of several architectures. Another warning says where
    a list leaves the head out.

    Args:
        request: The flags.
        model: The float model, which may be on the meta device, or a graph.
        config: How it will be quantized.

    Returns:
        The configuration without the patterns that were warned of.

    Raises:
        typer.BadParameter: Patterns match no layer that can be quantized, or one of a scheme or a
            group size none that it decides about.
    """
    given = [("--group_size_per_layer", pattern) for pattern, _ in request.layer_group_sizes]
    given += [("--layer_quant_scheme", pattern) for pattern, _ in request.layer_schemes]
    if not (given or request.excluded):
        return config
    layers, exclude = _names_in(model, config)
    known = [name for names in layers for name in names]
    idle = check_exclusions(request.excluded or [], model, known, _default_of(model))
    _check_decisions(request, given, layers, exclude)
    if request.excluded:
        _warn_of_quantized_head(model, [*exclude, *(pattern for _, pattern in given)])
    return replace(config, exclude=[pattern for pattern in config.exclude if pattern not in idle])


def _default_of(model: nn.Module) -> str:
    """Return the sentence that tells what stays in float without ``--exclude_layers``."""
    from quark.torch.quantization.config.resolution import output_head

    head = _few(output_head(model))
    said = f" Without this flag, {head} and the parts of --include_parts stay in float; a list "
    return said + "replaces these." if head else ""


def _warn_of_quantized_head(model: nn.Module, named: list[str]) -> None:
    """Warn that a list of layers in float leaves out the output head, unless a pattern names it."""
    from quark.torch.quantization.config.match import matches
    from quark.torch.quantization.config.resolution import output_head

    lost = [name for name in output_head(model) if not matches(name, named)]
    if lost:
        logger.warning(
            "--exclude_layers replaces the default, so the output head (%s) is quantized. Add it "
            "to the list to keep it in float.",
            _few(lost),
        )


def _few(names: list[str]) -> str:
    """Return names with commas; the first of many stand for all."""
    return ", ".join(names[:_NAMED]) + ", …" * (len(names) > _NAMED)


def _names_in(model: nn.Module, config: Config) -> tuple[list[list[str]], list[str]]:
    """Return the names of each layer that can be quantized, and patterns of those in float."""
    from torch import fx

    from quark.torch.quantization.config.resolution import resolve_names
    from quark.torch.quantization.graph_mode.quantization import names_in_graph
    from quark.torch.quantization.nn.experts import temporarily_split_experts
    from quark.torch.quantization.nn.operators import is_operator_module

    if isinstance(model, fx.GraphModule):
        return names_in_graph(model, config)
    with temporarily_split_experts(model):
        exclude = resolve_names(config, model).exclude
        return [[name] for name, m in model.named_modules() if is_operator_module(m)], exclude


def _check_decisions(
    request: Request, given: list[tuple[str, str]], layers: list[list[str]], exclude: list[str]
) -> None:
    """Check patterns of layers; see ``check_patterns``.

    Args:
        request: The flags.
        given: Flags with patterns; the first pattern that matches a layer decides about it.
        layers: Names of each layer, one of which a pattern matches.
        exclude: Patterns of layers in float.
    """
    from quark.torch.quantization.config.match import matches

    def selects(patterns: list[str], names: list[str]) -> bool:
        return any(matches(name, patterns) for name in names)

    patterns = [pattern for _, pattern in given]
    for number, (flag, pattern) in enumerate(given):
        own = [names for names in layers if selects([pattern], names)]
        if not own:
            known = [name for names in layers for name in names]
            raise console.wrong(
                flag, f"no layer matches {pattern!r}. {nearest_layers(pattern, known)}"
            )
        quantized = [names for names in own if not selects(exclude, names)]
        if not quantized:
            raise console.wrong(flag, f"{pattern!r}: {_in_float(request)}")
        earlier = patterns[:number]
        if all(selects(earlier, names) for names in quantized):
            first = next(other for other in earlier if selects([other], quantized[0]))
            raise console.wrong(
                flag,
                f"{pattern!r} has no effect: {first!r} comes before and matches the same layers. "
                "The first match applies, group sizes before schemes. Leave one of them out.",
            )


def _in_float(request: Request) -> str:
    """Return why layers stay in float, and what to give."""
    if request.excluded is not None:
        return "--exclude_layers keeps these layers in float. Leave one of them out."
    return (
        "these layers stay in float by default. Give --exclude_layers with the layers that are to "
        "stay in float, or without a value for none."
    )


def leave_unpassed_in_float(model: nn.Module, config: Config) -> Config:
    """Return the configuration without inputs that pass through no layer; a warning names these.

    Args:
        model: The float model, which may be on the meta device.
        config: How it will be quantized.
    """
    from quark.torch.quantization import direct_reads
    from quark.torch.quantization.config.match import assign
    from quark.torch.quantization.config.resolution import resolve_names
    from quark.torch.quantization.nn.operators import is_operator

    operators = {n: type(m) for n, m in model.named_modules() if is_operator(type(m))}
    layers = assign(operators, resolve_names(config, model))
    return direct_reads.leave_unpassed_in_float(model, config, layers)[0]


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
    if "onnx" in request.exports and not reads_text(model):
        raise console.wrong(
            "--model_export",
            f"this command traces ONNX files on tokens, and {type(model).__name__} reads "
            f"{name_of_input(model)}. Write hf_format, or call ModelExporter.export_onnx_model "
            "with inputs in Python (docs/onnx.md).",
        )
    for container in limited:
        container.check_installed()
    if request.use_cache:
        with suppress(NotImplementedError, RuntimeError):  # steps that depend on values
            check_cache(model)
    fill_with_placeholders(model)
    try:
        with temporarily_quantized(model, config):
            for container in limited:
                _check_container(request, container, model)
    except ValueError as error:  # the configuration does not fit the model
        raise typer.BadParameter(str(error)) from None


def check_cache(model: nn.Module) -> None:
    """Check that a decoder keeps keys and values, which are inputs of an ONNX file with a cache.

    Args:
        model: The model. On the meta device, models whose steps do not depend on values run.

    Raises:
        NotImplementedError: The model on the meta device needs values.
        RuntimeError: Likewise.
        typer.BadParameter: It keeps something else, or nothing.
    """
    import torch

    from quark.torch.export.onnx.inputs import ModelInputs
    from quark.torch.graph.eval_mode import eval_mode

    ids = torch.arange(16)[None]
    try:
        with eval_mode(model):
            ModelInputs.bind(model, {"input_ids": ids}, use_cache=True)
    except ValueError as error:
        raise console.wrong("--use_cache", str(error)) from None


def _check_container(request: Request, container: Container, model: nn.Module) -> None:
    """Check that an output can hold a quantized model.

    Raises:
        typer.BadParameter: It cannot.
    """
    from quark.torch.export.gguf.architectures import UnknownArchitecture

    try:
        container.check_writable(model, export_settings(request, None))
    except UnknownArchitecture as error:
        raise console.wrong("--model_export", str(error)) from None
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
