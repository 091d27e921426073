"""Quantizers on the edges of a graph, in a form that the exporter of torch can trace."""

from __future__ import annotations

import torch
from torch import fx, nn

from quark.torch.export.onnx.activations import ActivationQuantizer, activation_problem
from quark.torch.export.onnx.dequantize_linear import SUPPORTED
from quark.torch.export.onnx.functions import FunctionTable
from quark.torch.export.onnx.layers import OnnxLayer
from quark.torch.export.onnx.placeholders import ParameterPlaceholder
from quark.torch.quantization.graph_mode.edges import edge_modules, edge_quantizers
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer


def check_edges(model: nn.Module) -> None:
    """Check that ONNX computes the quantizers on the edges of a graph.

    Raises:
        ValueError: It does not compute one of them.
    """
    for name, quantizer in edge_quantizers(model).items():
        problem = activation_problem(quantizer.spec)
        if problem:
            raise ValueError(
                f"ONNX cannot hold the edge {name}: it {problem}. It holds {SUPPORTED}. "
                "Quantize the operators at this edge otherwise, or exclude them."
            )


def input_scales(model: nn.Module) -> dict[nn.Module, list[torch.Tensor | None]]:
    """Return the scales of the inputs of each layer of a graph, one for each call.

    A scale is None if the input is not the result of a quantizer with a static scale per tensor.
    Other models than graphs give nothing.
    """
    scales: dict[nn.Module, list[torch.Tensor | None]] = {}
    if not isinstance(model, fx.GraphModule):
        return scales
    modules = edge_modules(model)
    for node in model.graph.nodes:
        layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, QuantizedLayer):
            source = node.args[0] if isinstance(node.args[0], fx.Node) else node
            quantizer = modules.get(str(source.target)) if source.op == "call_module" else None
            scale = None if quantizer is None or quantizer.is_dynamic else quantizer.scale
            is_one = scale is not None and scale.dim() == 0
            scales.setdefault(layer, []).append(scale if is_one else None)
    return scales


def replace_edges(model: nn.Module, functions: FunctionTable) -> None:
    """Replace the quantizers on the edges of a graph by modules that can be traced, in place.

    Args:
        model: A graph, whose layers are ``OnnxLayer``; other models have no edges.
        functions: Functions of the ONNX graph.
    """
    if not isinstance(model, fx.GraphModule):
        return
    modules = edge_modules(model)
    unpaired = _unpaired(model, modules)
    replaced = {
        quantizer: ActivationQuantizer(
            quantizer.quantized_tensor(None, True), quantizer not in unpaired, functions
        )
        for quantizer in modules.values()
    }
    for name, quantizer in modules.items():
        model.set_submodule(name, replaced[quantizer])


def _unpaired(model: fx.GraphModule, modules: dict[str, TensorQuantizer]) -> set[TensorQuantizer]:
    """Return the quantizers whose values reach a weight that takes no quantized other factor."""
    unpaired: set[TensorQuantizer] = set()
    reached: set[fx.Node] = set()  # nodes whose results reach such a weight
    for node in reversed(model.graph.nodes):
        name = str(node.target) if node.op == "call_module" else None
        quantizer = modules.get(name or "")
        if quantizer is not None:
            if any(user in reached for user in node.users):
                unpaired.add(quantizer)
        elif name is not None:
            layer = model.get_submodule(name)
            if isinstance(layer, OnnxLayer) and not _is_pairable(layer):
                reached.add(node)
        elif any(user in reached for user in node.users):
            reached.add(node)
    return unpaired


def _is_pairable(layer: OnnxLayer) -> bool:
    weight = layer.weight
    return not isinstance(weight, ParameterPlaceholder) or weight.stored.is_pairable
