"""Quantized graphs in checkpoints of tensors.

A checkpoint has no place for operators. So ``config.json`` has a section "graph" with the
configuration, from which the graph is built again out of the exported float graph, and a digest of
the result: only the same graph takes the tensors. The scales of edges lie beside the tensors of the
layers: ``edge_quantizers.relu.scale``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx, nn

from quark.torch.export.checkpoint.files import TensorHeader
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.layer_types import LAYER_TYPES
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.graph_mode.edges import EDGES, edge_quantizers, reset_edges
from quark.torch.quantization.graph_mode.passes.graph_edits import copy_graph
from quark.torch.quantization.graph_mode.quantization import build_graph, is_exported
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import PARTS, TensorQuantizer

GRAPH = "graph"  # key of config.json
_CONFIG, _DIGEST = "quantization_config", "sha256"
_SAME = "give torch.export.export(model.eval(), args).module() of the model that was quantized"


def is_quantized_graph(model: nn.Module) -> bool:
    """Whether a model is a graph with quantized layers or edges."""
    is_quantized = any(isinstance(m, QuantizedLayer) for m in model.modules())
    return isinstance(model, fx.GraphModule) and (is_quantized or bool(edge_quantizers(model)))


def layers_config(graph: nn.Module) -> Config:
    """Return a configuration with the layers of a graph alone, each by its name."""
    layers = {
        literal(name): layer.quant_config
        for name, layer in graph.named_modules()
        if isinstance(layer, QuantizedLayer)
    }
    return Config(layer_quant_config=layers)


def edge_tensors(graph: nn.Module) -> dict[str, torch.Tensor]:
    """Return scales and zero points of the edges of a graph, by their names in a checkpoint."""
    tensors = {
        f"{EDGES}.{name}.{part}": getattr(quantizer, part)
        for name, quantizer in edge_quantizers(graph).items()
        for part in PARTS
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def graph_section(graph: fx.GraphModule) -> dict[str, Any]:
    """Return the section "graph" of ``config.json``.

    Raises:
        ValueError: The configuration names types of modules that no file may name.
    """
    config: Any = getattr(graph, "quant_config", None)
    if not isinstance(config, Config):
        raise ValueError("The graph does not remember how it was quantized.")
    for kind in config.layer_type_quant_config:
        if kind not in LAYER_TYPES.values():
            raise ValueError(
                f"layer_type_quant_config: files cannot name {kind.__name__}. Select its operators "
                "by name in layer_quant_config, or use save_params(…, quant_mode=fx_graph_mode)."
            )
    return {_CONFIG: config.to_dict(everything=True), _DIGEST: _digest(graph)}


def build_for_load(
    model: nn.Module, section: Any, entries: Mapping[str, TensorHeader]
) -> fx.GraphModule:
    """Return a graph with float layers and empty scales of edges, ready for the tensors.

    Args:
        model: The float graph. It is not changed.
        section: Section "graph" of ``config.json``.
        entries: Headers of the tensors.

    Raises:
        ValueError: The model is no float graph, or another one; the section is damaged; or an edge
            has no scale or zero point, or one of a wrong type.
    """
    if not is_exported(model) or is_quantized_graph(model):
        raise ValueError(f"The checkpoint holds a quantized graph: {_SAME}.")
    assert isinstance(model, fx.GraphModule)
    if not isinstance(section, dict) or section.keys() != {_CONFIG, _DIGEST}:
        raise ValueError(f"config.json: expected {_CONFIG} and {_DIGEST} in {GRAPH!r}.")
    config = Config.from_dict(section[_CONFIG])
    graph = build_graph(model, config)
    if _digest(graph) != section[_DIGEST]:
        raise ValueError(
            f"The quantized graph has other operators than this one gives: {_SAME}, exported by "
            "the same version of torch."
        )
    _prepare_edges(graph, entries)
    graph.quant_config = config  # type: ignore[assignment]  # modules declare tensors alone
    return graph


def copy_for_load(
    model: fx.GraphModule, entries: Mapping[str, TensorHeader]
) -> fx.GraphModule | None:
    """Return a copy of a frozen graph that is ready for its own tensors, to verify them.

    Args:
        model: The graph. It is not changed.
        entries: Headers of the tensors.

    Returns:
        A graph with float layers and empty scales of edges; None if a checkpoint was loaded into
        the given one, whose layers are packed.

    Raises:
        ValueError: An edge has no scale or zero point, or one of a wrong type.
    """
    graph = copy_graph(model)
    for layer in list(graph.modules()):
        if isinstance(layer, FakeQuantizedLayer):
            layer.to_float()
        elif isinstance(layer, QuantizedLayer):
            return None
    reset_edges(graph)
    _prepare_edges(graph, entries)
    return graph


def _prepare_edges(graph: fx.GraphModule, entries: Mapping[str, TensorHeader]) -> None:
    """Give the edges of a graph empty scales as a checkpoint has them.

    Raises:
        ValueError: One is missing, or of a wrong type.
    """
    for name, quantizer in edge_quantizers(graph).items():
        for part in PARTS:
            header = entries.get(f"{EDGES}.{name}.{part}")
            if header is not None:
                setattr(quantizer, part, _empty_part(f"{EDGES}.{name}.{part}", header, quantizer))
        _check_complete(name, quantizer)
        quantizer.end_training()


def _empty_part(name: str, header: TensorHeader, quantizer: TensorQuantizer) -> torch.Tensor:
    """Return a scale or zero point of an edge on the meta device, in the stored type.

    Raises:
        ValueError: The type or the shape is none of such a tensor.
    """
    scheme, part, shape = quantizer.scheme, name.rpartition(".")[2], header.shape
    is_float = part.startswith("scale") or scheme.float_zero_point
    is_single = scheme.qscheme is QSchemeType.per_tensor and part in ("scale", "zero_point")
    if header.dtype.is_floating_point is not is_float or (is_single and prod(shape) != 1):
        kind = "floats" if is_float else "integers"
        raise ValueError(
            f"{name} is {header.dtype} {list(shape)}, expected "
            f"{f'one of {kind}' if is_single else kind}: the checkpoint is damaged."
        )
    return torch.empty(() if is_single else shape, dtype=header.dtype, device="meta")


def _check_complete(name: str, quantizer: TensorQuantizer) -> None:
    """Check that the checkpoint has what an edge needs.

    Raises:
        ValueError: The scale or the zero point is missing.
    """
    scheme = quantizer.scheme
    if quantizer.needs_data and quantizer.scale is None and quantizer.scale_2 is None:
        raise ValueError(f"{EDGES}.{name}.scale is missing in the checkpoint.")
    has_zero_point = scheme.fmt.scaled and not (scheme.fmt.is_float or scheme.shares_exponents)
    is_zero = scheme.symmetric and scheme.fmt.signed
    lacks = quantizer.scale is not None and quantizer.zero_point is None
    if lacks and has_zero_point and not is_zero:
        raise ValueError(f"{EDGES}.{name}.zero_point is missing in the checkpoint.")


def check_edges(graph: nn.Module) -> None:
    """Check that the scales of edges are sound.

    Raises:
        ValueError: A scale is not finite and positive.
    """
    for name, tensor in edge_tensors(graph).items():
        is_scale = name.rpartition(".")[2].startswith("scale")
        values = tensor.float()
        if is_scale and not bool((values.isfinite() & (values > 0)).all()):
            raise ValueError(
                f"{name} is not finite and positive: the checkpoint is damaged. Export it again."
            )


def _digest(graph: fx.GraphModule) -> str:
    """Return a digest of the operators of a graph and of what they read."""
    lines = [f"{n.op} {n.name} {n.target} {n.args} {n.kwargs}" for n in graph.graph.nodes]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
