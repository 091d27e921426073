"""Scales of int32 biases: integer products are sums of codes in units of scale_w · scale_x.

    y = Σ (s_w q_w) (s_x q_x) + b = s_w s_x (Σ q_w q_x + q_b),   b = s_w s_x q_b

So an int32 bias has the scale of the weight times that of the input, per channel if weights are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.graph_mode.edges import edge_quantizer
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer


def set_bias_scales(graph: fx.GraphModule) -> None:
    """Set the scale of each int32 bias to that of the weight times that of the input.

    A layer that runs on several inputs takes the smallest of their scales. A bias keeps its own
    scale if weight or input have no static scale, or have scales in groups.

    Args:
        graph: A calibrated graph.
    """
    inputs: dict[FakeQuantizedLayer, list[torch.Tensor | None]] = {}
    for node in graph.graph.nodes:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, FakeQuantizedLayer):
            inputs.setdefault(layer, []).append(_scale_of(graph, node.args[0]))
    for layer, scales in inputs.items():
        bias, weight = layer.bias_quantizer, layer.weight_quantizer
        is_int32 = bias is not None and bias.spec.dtype is Dtype.int32
        if bias is None or weight is None:
            continue
        if not is_int32 or not bias.scheme.symmetric:
            continue
        known = [scale for scale in scales if scale is not None]
        if len(known) == len(scales) and _is_per_output(layer, weight):
            assert weight.scale is not None
            _set_scale(bias, weight.scale.float() * torch.stack(known).amin())
            if layer.frozen:  # an algorithm rounded the weight before the input had a scale
                bias.freeze_(layer.bias.detach())


def _scale_of(graph: fx.GraphModule, value: fx.Node) -> torch.Tensor | None:
    """Return the scale [] of the quantizer that makes a value, or None."""
    quantizer = edge_quantizer(graph, value)
    if quantizer is None or quantizer.is_dynamic:
        return None
    is_per_tensor = quantizer.scheme.qscheme is QSchemeType.per_tensor
    return quantizer.scale if is_per_tensor else None


def _is_per_output(layer: FakeQuantizedLayer, weight: TensorQuantizer) -> bool:
    """Whether a weight has one scale, or one for each output."""
    if weight.scale is None or weight.spec.quantizes_codes:
        return False
    if weight.scheme.qscheme is QSchemeType.per_tensor:
        return True
    is_per_channel = weight.scheme.qscheme is QSchemeType.per_channel
    output_axis = 1 if getattr(layer, "transposed", False) else 1 - layer.input_axis
    along_outputs = weight.scheme.axis % layer.weight.dim() == output_axis
    return is_per_channel and along_outputs and weight.scale.shape == layer.bias.shape


def _set_scale(bias: TensorQuantizer, scale: torch.Tensor) -> None:
    per_channel = scale.dim() > 0
    qscheme = QSchemeType.per_channel if per_channel else QSchemeType.per_tensor
    spec = replace(bias.spec, qscheme=qscheme, ch_axis=0 if per_channel else bias.spec.ch_axis)
    bias.spec = spec.for_parameter()
    bias.scheme = bias.spec.scheme
    bias.scale, bias.zero_point = scale, None
    bias.is_derived = True  # while training too: a range of its own would have no headroom
