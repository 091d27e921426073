"""Configuration of the layers and operators of a graph."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from quark.torch.quantization.config.compatibility import warn_about_ignored
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import matches, report_unmatched
from quark.torch.quantization.config.resolution import resolve_names
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.quantization.graph_mode.nodes import (
    is_aten,
    is_float_tensor,
    module_path,
    module_type,
    operator_name,
)
from quark.torch.quantization.graph_mode.operators import float_inputs, is_quantizable
from quark.torch.quantization.nn.operators import is_operator
from quark.torch.quantization.preparation import select_layers

logger = logging.getLogger(__name__)

# Layers that a global configuration quantizes in graphs, beside those of models in eager mode.
_IN_GRAPHS = (nn.Conv1d, nn.Conv3d)


def graph_config(config: Config, graph: fx.GraphModule) -> Config:
    """Return the configuration with the names of a graph, for the functions of eager mode.

    Raises:
        ValueError: An option has no meaning in a graph.
    """
    if config.kv_cache_post_rope:
        raise ValueError(
            "kv_cache_post_rope quantizes keys inside of attention modules, which a graph does not "
            "have. Leave it out: the operators of attention are quantized themselves."
        )
    if config.query_quant_config:
        raise ValueError(
            "query_quant_config quantizes queries inside of attention modules, which a graph does "
            "not have. Leave it out: the operators of attention are quantized themselves."
        )
    if config.softmax_quant_spec is not None:
        raise ValueError(
            "softmax_quant_spec quantizes probabilities inside of attention modules, which a graph "
            "does not have. Leave it out: the operators of attention are quantized themselves."
        )
    general = dict.fromkeys(_IN_GRAPHS, config.global_quant_config)
    layer_types: Any = {**general, **config.layer_type_quant_config}
    config = resolve_names(config, graph)
    return replace(
        config, layer_type_quant_config=layer_types, quant_mode=QuantizationMode.eager_mode
    )


def configure_layers(graph: fx.GraphModule, config: Config) -> dict[str, QuantizationConfig]:
    """Return the configuration of each layer that will be quantized, by its name.

    Warns about patterns that match neither a module nor an operator, and about ignored options.

    Args:
        graph: A graph with layers.
        config: Result of ``graph_config``.

    Raises:
        ValueError: The configuration does not fit a layer, or quantizes none.
    """
    layers = select_layers(graph, config, warns=False)
    warn_about_ignored(config)
    names = [name for name, _ in graph.named_modules()]
    names += [name for node in graph.graph.nodes if is_aten(node) for name in _names(node)]
    report_unmatched(names, config)
    return layers


def configure_nodes(
    graph: fx.GraphModule, config: Config, layers: Mapping[str, QuantizationConfig]
) -> dict[fx.Node, QuantizationConfig]:
    """Return the configuration of each node that is quantized, in the order of the graph.

    An operator takes the first entry of ``layer_quant_config`` that matches one of its names, else
    the entry of the type of the module that it is the whole of, such as ``nn.ReLU``, else the
    global one. Its names are that of the node (``add_1``), this name after that of the module
    that it is part of (``blocks.0.add_1``) and, if it is the whole of a module of torch, the name
    of that (``blocks.0.relu``).

    Args:
        graph: A graph with layers.
        config: Result of ``graph_config``.
        layers: Configuration of each layer.
    """
    configs: dict[fx.Node, QuantizationConfig] = {}
    for node in graph.graph.nodes:
        config_of = None
        if node.op == "call_module":
            config_of = layers.get(str(node.target))
        elif is_quantizable(node):
            config_of = _operator_config(node, config)
        if config_of is not None and not config_of.is_empty:
            configs[node] = config_of
    return configs


def selectable_names(graph: fx.GraphModule) -> list[list[str]]:
    """Return the names of each layer and operator that can be quantized; one of them selects it.

    Args:
        graph: A graph with layers.
    """
    modules = dict(graph.named_modules())
    return [
        [str(node.target)] if node.op == "call_module" else _names(node)
        for node in graph.graph.nodes
        if is_quantizable(node)
        or (node.op == "call_module" and is_operator(type(modules[str(node.target)])))
    ]


def report_unmatched_types(graph: fx.GraphModule, config: Config) -> None:
    """Warn about types of modules that match neither a layer nor an operator.

    Args:
        graph: A graph with layers.
        config: Configuration of the user.
    """
    kinds = {module_type(node) for node in graph.graph.nodes if is_aten(node)}
    for cls in config.layer_type_quant_config:
        is_layer = any(isinstance(module, cls) for module in graph.modules())
        if not is_layer and f"{cls.__module__}.{cls.__qualname__}" not in kinds:
            logger.warning(
                "layer_type_quant_config: %s is the type of no layer or operator of the graph: it "
                "has no effect.",
                cls.__name__,
            )


def report_float_operators(graph: fx.GraphModule, movements: set[fx.Node]) -> None:
    """Log the operators that compute in float because they have no quantized form.

    Args:
        graph: A graph with layers.
        movements: Nodes whose operators only move values.
    """
    counts = Counter(
        operator_name(node)
        for node in graph.graph.nodes
        if is_aten(node) and _computes(node) and node not in movements and not is_quantizable(node)
    )
    if counts:
        described = ", ".join(f"{name} ({n})" for name, n in sorted(counts.items()))
        logger.info("These operators stay in float: %s.", described)


def _computes(node: fx.Node) -> bool:
    return is_float_tensor(node) and bool(float_inputs(node))


def _operator_config(node: fx.Node, config: Config) -> QuantizationConfig | None:
    names = _names(node)
    if any(matches(name, config.exclude) for name in names):
        return None
    for pattern, layer in config.layer_quant_config.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return layer
    kind = module_type(node)
    for cls, layer in config.layer_type_quant_config.items():
        if kind == f"{cls.__module__}.{cls.__qualname__}":
            return layer
    return config.global_quant_config


def _names(node: fx.Node) -> list[str]:
    """Return the names by which a configuration can select an operator."""
    path = module_path(node)
    names = [node.name, f"{path}.{node.name}" if path else node.name]
    is_whole = module_type(node).startswith("torch.nn.")
    return [*names, path] if is_whole else names
