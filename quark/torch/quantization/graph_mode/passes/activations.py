"""Other forms of activations, for those who ask for them.

- SiLU and GELU in hard forms (Howard et al. 2019, section 5.2), which change the function:
  x sigmoid(k x) becomes x relu6(k x + 3) / 6, with k = 1 for SiLU and 1.702 for GELU.
- ReLU6 as ReLU and a cap for each channel, a parameter, which rescaling can divide.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import GraphModule, Node

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    fake_value,
    insert_call,
    insert_tensor,
    is_call,
    replace,
    unused_name,
)
from quark.torch.quantization.graph_mode.passes.layers import read_layer
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass

_GELU_SLOPE = 1.702  # GELU is near x sigmoid(1.702 x) (Hendrycks and Gimpel 2016, section 2)


def _find_smooth(graph: GraphModule, options: PassOptions) -> Candidates:
    nodes = [node.name for node in graph.graph.nodes if is_call(node, "silu", "gelu")]
    return Candidates(nodes if options.hard_activations else [], {})


def _make_hard(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    x = arguments(node)["self"]
    if is_call(node, "silu"):
        result = insert_call(node, torch.ops.aten.hardswish.default, x)
    else:
        slope = insert_call(node, torch.ops.aten.mul.Tensor, x, _GELU_SLOPE)
        gate = insert_call(node, torch.ops.aten.hardsigmoid.default, slope)
        result = insert_call(node, torch.ops.aten.mul.Tensor, x, gate)
    replace(node, result)
    return result


def _find_capped(graph: GraphModule, options: PassOptions) -> Candidates:
    nodes = [node.name for node in graph.graph.nodes if _cap(graph, node) is not None]
    return Candidates(nodes if options.channel_caps else [], {})


def _cap(graph: GraphModule, node: Node) -> float | None:
    """Return the cap of an activation min(max(x, 0), cap) of the outputs of a layer, or None."""
    if is_call(node, "relu6"):
        source, low, high = arguments(node)["self"], 0, 6
    elif is_call(node, "hardtanh"):
        source, low, high = (arguments(node)[name] for name in ("self", "min_val", "max_val"))
    elif is_call(node, "clamp") and arguments(node)["self"] is not None:
        source, low, high = (arguments(node)[name] for name in ("self", "min", "max"))
    else:
        return None
    layer = read_layer(graph, source)
    is_cap = low == 0 and isinstance(high, (int, float)) and high > 0
    if layer is None or not layer.has_channel_axis or not is_cap:
        return None
    return float(high)


def _make_caps(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    cap, x = _cap(graph, node), arguments(node)["self"]
    assert cap is not None
    value = fake_value(x)
    caps = torch.full((value.shape[1],), cap, dtype=value.dtype, device=value.device)
    name = unused_name(graph, f"{node.name}.cap")
    source = insert_tensor(graph, node, name, nn.Parameter(caps, requires_grad=False))
    shape = [-1, *[1] * (value.dim() - 2)]  # (channels,) -> (channels, 1, 1)
    channels = insert_call(node, torch.ops.aten.view.default, source, shape)
    positive = insert_call(node, torch.ops.aten.relu.default, x)
    result = insert_call(node, torch.ops.aten.minimum.default, positive, channels)
    replace(node, result)
    return result


MAKE_HARD = Pass("make an activation hard", _find_smooth, _make_hard, is_exact=False)
MAKE_CAPS = Pass("give each channel a cap", _find_capped, _make_caps)
