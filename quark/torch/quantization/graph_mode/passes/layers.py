"""Layers of a graph: calls of convolutions and linear layers whose weight is a parameter."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule, Node

from quark.torch.quantization.graph_mode.passes.graph_edits import (
    arguments,
    insert_tensor,
    is_call,
    read_tensor,
    readers,
    set_arguments,
    shape_of,
    unused_name,
)

_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_CACHED = 2**15  # elements that are multiplied at once
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", *_TRANSPOSED)


class Layer(NamedTuple):
    """A call of a convolution or a linear layer.

    Attributes:
        node: The call.
        weight: (out, in / groups, …), or (in, out / groups, …) if transposed.
        bias: (out,), or None.
        is_transposed: Whether it is a transposed convolution.
        groups: Groups of channels, 1 for linear layers.
    """

    node: Node
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool
    groups: int

    @property
    def input(self) -> Node:
        """The node that the layer reads."""
        node: Node = arguments(self.node)["input"]
        return node

    @property
    def pads_zeros(self) -> bool:
        """Whether outputs at the border see zeros around the input."""
        padding = arguments(self.node).get("padding", 0)
        if padding == "same":
            return any(size > 1 for size in self.weight.shape[2:])
        return padding != "valid" and padding != 0 and any(padding)

    @property
    def has_channel_axis(self) -> bool:
        """Whether axis 1 of inputs and outputs has the channels: a batch, and no token axis."""
        shape = shape_of(self.node)
        return shape is not None and len(shape) == self.weight.dim()

    def scale_outputs(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the weight of a layer whose outputs are multiplied by (out,) float64 factors.

        Products are float64. The result is float64 if the layer is transposed, else it has the
        type of the weight.
        """
        weight = self.weight.detach()
        if not self.is_transposed:
            return _multiply_rows(weight, factors)
        weight = weight.double()
        # (in, out / g, …) -> (g, in / g, out / g, …): channel j of group i is i · out / g + j.
        grouped = weight.view(self.groups, -1, *weight.shape[1:])
        return (grouped * _along(factors.view(self.groups, 1, -1), grouped, 0)).flatten(0, 1)

    def scale_inputs(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the float64 weight of a layer whose inputs are multiplied by (in,) factors.

        The layer is not transposed.
        """
        # (out, in / g, …) -> (g, out / g, in / g, …)
        weight = self.weight.detach().double()
        grouped = weight.view(self.groups, -1, *weight.shape[1:])
        return (grouped * _along(factors.view(self.groups, 1, -1), grouped, 0)).flatten(0, 1)


def _multiply_rows(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return float64 products of rows and factors in the type of the weight.

    A few rows at once stay in the cache: this takes half of the time of the whole weight at once.
    """
    result = torch.empty_like(weight)
    rows = max(1, _CACHED // max(1, weight[0].numel()))
    parts = (torch.split(tensor, rows) for tensor in (result, weight, factors))
    for out, values, scales in zip(*parts, strict=True):
        out.copy_(values.double() * _along(scales, values, 0))
    return result


def _along(factors: torch.Tensor, weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return factors with size-1 axes after them, up to the axes of a weight."""
    return factors.view(*factors.shape, *[1] * (weight.dim() - axis - factors.dim()))


def is_layer_call(node: Node) -> bool:
    """Whether a node calls an operation with a weight: product, convolution or embedding."""
    return is_call(node, "linear", "embedding", *_CONVOLUTIONS)


def read_layer(graph: GraphModule, node: Any) -> Layer | None:
    """Return a layer, or None if a node is something else or its parameters are computed."""
    if not is_call(node, "linear", *_CONVOLUTIONS):
        return None
    given = arguments(node)
    weight, bias = (read_tensor(graph, given[name]) for name in ("weight", "bias"))
    if weight is None or (bias is None and given["bias"] is not None):
        return None
    is_transposed = given.get("transposed", is_call(node, *_TRANSPOSED))
    return Layer(node, weight, bias, is_transposed, given.get("groups", 1))


def layers_of_weight(graph: GraphModule, layer: Layer) -> list[Layer] | None:
    """Return all layers with the parameters of one; None if something else reads these."""
    layers = [read_layer(graph, node) for node in readers(graph, layer.weight)]
    same = [other for other in layers if other is not None and other.weight is layer.weight]
    if len(same) < len(layers) or any(other.bias is not layer.bias for other in same):
        return None
    if layer.bias is not None and len(readers(graph, layer.bias)) > len(same):
        return None
    return same


def set_parameters(
    graph: GraphModule, layers: list[Layer], weight: torch.Tensor, bias: torch.Tensor
) -> None:
    """Give layers that share their parameters others, under the same names.

    Args:
        graph: The graph.
        layers: All layers with these parameters, in the order of execution.
        weight: The weight, in the shape of the present one.
        bias: (out,).
    """
    first = layers[0]
    names = {key: arguments(first.node)[key] for key in ("weight", "bias")}
    weight_name = str(names["weight"].target)
    bias_name = (
        unused_name(graph, sibling_name(weight_name, "bias"))
        if names["bias"] is None
        else str(names["bias"].target)
    )
    new = {
        key: insert_tensor(graph, first.node, name, _like(value, first.weight))
        for key, name, value in (("weight", weight_name, weight), ("bias", bias_name, bias))
    }
    for layer in layers:
        set_arguments(layer.node, **new)


def _like(values: torch.Tensor, parameter: torch.Tensor) -> nn.Parameter:
    """Return values as a parameter of the type of another, trained if that one is."""
    return nn.Parameter(values.to(parameter.dtype), parameter.requires_grad)


def sibling_name(name: str, leaf: str) -> str:
    """Return the name of another parameter of a module: conv.weight -> conv.bias, w -> w_bias."""
    owner, _, last = name.rpartition(".")
    if last == "weight":
        return f"{owner}.{leaf}" if owner else leaf
    return f"{name}_{leaf}"
