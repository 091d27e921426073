"""Quantization of an exported graph: the steps of eager mode, and quantizers on the edges."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from quark.torch.graph.discovery import discover
from quark.torch.graph.parameter_writes import record_writes
from quark.torch.graph.structure import Structure
from quark.torch.pipeline.batches import flatten_batches, run_batch
from quark.torch.pipeline.data_source import make_repeatable
from quark.torch.pipeline.processes import joined
from quark.torch.quantization.algorithms import (
    apply_algorithms,
    check_algorithms,
    check_for_graphs,
    find_algorithms,
)
from quark.torch.quantization.calibration import calibrate
from quark.torch.quantization.checks import check_data, check_processes
from quark.torch.quantization.config.algo import CLEConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.quantization.graph_mode.bias import set_bias_scales
from quark.torch.quantization.graph_mode.edges import (
    Edges,
    edge_quantizers,
    insert_edges,
    plan_edges,
    returned_values,
)
from quark.torch.quantization.graph_mode.float_graph import (
    independent_copy,
    rewrite,
    start_proof,
)
from quark.torch.quantization.graph_mode.inputs import example_inputs, fit_batches
from quark.torch.quantization.graph_mode.layers import raise_layers
from quark.torch.quantization.graph_mode.movement import find_movements
from quark.torch.quantization.graph_mode.nodes import call_functions
from quark.torch.quantization.graph_mode.operators import ACTIVATIONS, CLAMPS
from quark.torch.quantization.graph_mode.selection import (
    configure_layers,
    configure_nodes,
    graph_config,
    report_float_operators,
    report_unmatched_types,
    selectable_names,
)
from quark.torch.quantization.graph_mode.shifts import apply_shift_limits, check_shift_specs
from quark.torch.quantization.nn.learned_range import LearnedRangeQuantizer
from quark.torch.quantization.plan import Plan, prepare
from quark.torch.quantization.preparation import (
    check_parameters,
    mark_as_quantized,
    quantized_layers,
)

logger = logging.getLogger("quark")

_QUANTIZING = ("quark", "quantized_decomposed", "torchao")  # namespaces of operators
_EXPORT = "torch.export.export(model.eval(), args).module()"


def is_exported(model: nn.Module) -> bool:
    """Whether a model is a graph of operators, as ``torch.export`` makes it."""
    return isinstance(model, fx.GraphModule) and next(call_functions(model), None) is not None


def check_mode(model: nn.Module, config: Config) -> None:
    """Check that a model is what the mode of a configuration takes.

    Raises:
        ValueError: It is a graph in eager mode, or a module in graph mode, or options of graph mode
            are given in eager mode.
    """
    is_graph_mode = config.quant_mode is QuantizationMode.fx_graph_mode
    for name in ("pass_options", "shift_limits"):
        if getattr(config, name) is not None and not is_graph_mode:
            raise ValueError(f"{name} is for quant_mode=fx_graph_mode: leave it out.")
    if is_exported(model) and not is_graph_mode:
        raise ValueError(
            "The model is a graph of torch.export: set quant_mode=QuantizationMode.fx_graph_mode, "
            "or give the model that was exported."
        )
    if is_graph_mode and not isinstance(model, fx.GraphModule):
        raise ValueError(
            f"quant_mode=fx_graph_mode takes a graph, got a {type(model).__name__}: give {_EXPORT},"
            " or call FxGraphQuantizer, which exports the model itself."
        )


def check_trained_graph(graph: fx.GraphModule) -> None:
    """Check that a quantized graph can be frozen.

    Raises:
        ValueError: The graph is in training mode, or a trained range never started.
    """
    if graph.training:
        raise ValueError("The graph is in training mode: call freeze(model.eval()).")
    for name, quantizer in edge_quantizers(graph).items():
        if isinstance(quantizer, LearnedRangeQuantizer) and not quantizer.has_range:
            raise ValueError(
                f"The trained range of {name} has no value: train with data that reaches it, or "
                "pass a dataloader to quantize_model."
            )


def fix_graph_ranges(graph: fx.GraphModule) -> None:
    """Let the ranges of edges stay as they are, and set the scales that depend on them."""
    for quantizer in edge_quantizers(graph).values():
        quantizer.end_training()
    config = getattr(graph, "quant_config", None)
    _set_dependent_scales(graph, config if isinstance(config, Config) else Config())


def quantize_graph(
    graph: fx.GraphModule, config: Config, dataloader: Iterable[Any] | None
) -> fx.GraphModule:
    """Return a quantized copy of an exported graph.

    Args:
        graph: Result of ``torch.export.export(model.eval(), args).module()``. It is not changed.
        config: How to quantize it.
        dataloader: Batches for static ranges and algorithms, or None.

    Raises:
        ValueError: The graph cannot be quantized, the configuration does not fit, data is missing
            or does not fit, or a value is not finite.
    """
    for name, _ in quantized_layers(graph):
        raise ValueError(f"{name} is quantized already: export the float model again.")
    for node in call_functions(graph):
        if getattr(node.target, "namespace", None) in _QUANTIZING:
            raise ValueError(
                f"{node.name} ({node.target}) is an operator of a quantized model: export the "
                "float model."
            )
    copied = independent_copy(graph)
    data = () if dataloader is None else fit_batches(copied, make_repeatable(dataloader))
    inputs = example_inputs(copied, data)
    model, movements = _with_layers(copied, inputs, config)
    with joined():
        plan, edges = _check(model, config, data, movements)
        check_processes(model, plan)
        structure = _discover(model, plan, inputs)
        insert_edges(model, edges)
        prepare(model, plan)
        if structure is not None:
            with record_writes(lambda parameter: None):
                apply_algorithms(model, plan, structure)
        calibrate(model, plan)
        _set_dependent_scales(model, config)
        mark_as_quantized(model, config)
        if plan.data_digest is not None:
            model.calibration_sha256 = plan.data_digest  # type: ignore[assignment]
    logger.info("Model quantization has been completed.")
    return model


def build_graph(graph: fx.GraphModule, config: Config) -> fx.GraphModule:
    """Return what ``quantize_graph`` makes, with float layers and quantizers without scales.

    Args:
        graph: An exported graph. It is not changed.
        config: How it was quantized.

    Raises:
        ValueError: The configuration does not fit the graph.
    """
    copied = independent_copy(graph)
    model, movements = _with_layers(copied, example_inputs(copied, ()), config)
    config = graph_config(config, model)
    layers = configure_layers(model, config)
    nodes = configure_nodes(model, config, layers)
    insert_edges(model, _plan_edges(model, config, nodes, movements), trains=False)
    return model


def names_in_graph(graph: fx.GraphModule, config: Config) -> tuple[list[list[str]], list[str]]:
    """Return the names that select layers and operators, and patterns of those in float.

    Args:
        graph: An exported graph. It is not changed.
        config: How it will be quantized.

    Returns:
        The names of each layer and operator after the passes, and the resolved ``exclude``.

    Raises:
        ValueError: The graph cannot be quantized, or an option has no meaning in a graph.
    """
    copied = independent_copy(graph)
    model, _ = _with_layers(copied, example_inputs(copied, ()), config)
    return selectable_names(model), graph_config(config, model).exclude


def _with_layers(
    graph: fx.GraphModule, inputs: Sequence[Any], config: Config
) -> tuple[fx.GraphModule, set[fx.Node]]:
    """Return a rewritten graph with layers, and its nodes that only move values."""
    proof = start_proof(graph, inputs)
    rewritten = rewrite(graph, proof, _pass_options(config))
    # If the samples of a batch do not depend on each other, one shows what each operator does.
    sample = proof.first_sample(rewritten)
    model = raise_layers(rewritten)
    return model, find_movements(model, inputs if sample is None else sample)


def _set_dependent_scales(graph: fx.GraphModule, config: Config) -> None:
    """Set the scales that depend on those of other tensors: of int32 biases, and within limits."""
    set_bias_scales(graph)
    if config.shift_limits is not None:
        apply_shift_limits(graph, config.shift_limits)


def _check(
    model: fx.GraphModule, config: Config, data: Iterable[Any], movements: set[fx.Node]
) -> tuple[Plan, Edges]:
    """Check that a configuration fits a graph with layers, and return what will be done.

    Raises:
        ValueError: The configuration does not fit the graph, or data is missing.
    """
    report_unmatched_types(model, config)
    config = graph_config(config, model)
    algorithms = find_algorithms(config)
    check_for_graphs(algorithms)
    layers = configure_layers(model, config)
    nodes = configure_nodes(model, config, layers)
    if config.shift_limits is not None:
        _check_shift_options(config)
        check_shift_specs(nodes, model)
    edges = _plan_edges(model, config, nodes, movements)
    has_data = next(flatten_batches(data), None) is not None
    check_algorithms(config, algorithms, layers, data if has_data else None, None)
    if edges.needs_data and not has_data:
        raise ValueError(
            "Static activation ranges need calibration data: pass a dataloader to quantize_model, "
            "or set is_dynamic=True."
        )
    check_parameters(model)
    report_float_operators(model, movements)
    runs = has_data and bool(algorithms or edges.uses_data)
    digest = check_data(model, data, bool(algorithms)) if runs else None
    # The edges have the quantizers of inputs and outputs.
    weights = {n: replace(c, input_tensors=None, output_tensors=None) for n, c in layers.items()}
    batches = data if runs else ()
    return Plan(config, weights, {}, (), algorithms, batches, has_data, None, digest), edges


def _pass_options(config: Config) -> PassOptions:
    """Return the rewrites that a configuration asks for, or that its algorithms need."""
    options = config.pass_options or PassOptions()
    equalizes = any(isinstance(a, CLEConfig) for a in config.algo_config or [])
    return replace(options, channel_caps=options.channel_caps or equalizes)


def _check_shift_options(config: Config) -> None:
    """Raise ValueError if an option leaves values in float whose shifts are limited."""
    options = config.pass_options or PassOptions()
    for name, values in (
        ("fused_activations", "before activations"),
        ("float_outputs", "returned"),
    ):
        if getattr(options, name):
            raise ValueError(
                f"shift_limits: with {name}=True the values {values} have no scale, so their "
                "shifts are unknown. Leave one of the two out."
            )


def _plan_edges(
    model: fx.GraphModule,
    config: Config,
    nodes: Mapping[fx.Node, QuantizationConfig],
    movements: set[fx.Node],
) -> Edges:
    """Return the quantizers that a graph gets, given the configurations of its nodes."""
    options = config.pass_options or PassOptions()
    fused = ACTIVATIONS if options.fused_activations else CLAMPS
    in_float = returned_values(model, movements) if options.float_outputs else ()
    return plan_edges(nodes, movements, fused, in_float)


def _discover(model: fx.GraphModule, plan: Plan, inputs: Sequence[Any]) -> Structure | None:
    """Return the structure of a float graph if an algorithm needs it.

    Args:
        model: The graph.
        plan: How to quantize it.
        inputs: An example of each placeholder, for algorithms without data.
    """
    if not plan.algorithms:
        return None
    args, kwargs = tree_unflatten(list(inputs), model._in_spec)
    first = next(flatten_batches(plan.batches), None)
    proves = {need for a, options in plan.algorithms for need in a.proves(options)}

    def run() -> None:
        if first is None:
            model(*args, **kwargs)
        else:
            run_batch(model, first)

    return discover(model, run, proves)
