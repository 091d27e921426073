"""Batch norms of evaluation mode become a part of layers.

A batch norm with fixed statistics multiplies and shifts each channel (Jacob et al. 2018, section
3.2):

    y = a x + b   with   a = weight / sqrt(variance + eps),   b = bias - mean a

So a layer before it becomes (a W) x + (a bias + b), a layer after it (W a) x + (bias + W b), and
one alone is a convolution of 1 × 1 whose groups are its channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

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
    read_tensor,
    readers,
    replace,
    shape_of,
    unused_name,
)
from quark.torch.quantization.graph_mode.passes.layers import (
    Layer,
    layers_of_weight,
    read_layer,
    set_parameters,
    sibling_name,
)
from quark.torch.quantization.graph_mode.passes.rewriting import Candidates, Pass

_CONVOLUTIONS = {
    3: torch.ops.aten.conv1d.default,
    4: torch.ops.aten.conv2d.default,
    5: torch.ops.aten.conv3d.default,
}


class BatchNorm(NamedTuple):
    """A batch norm with fixed statistics.

    Attributes:
        node: The call.
        input: The node that it reads.
        parts: Mean, variance, weight and bias, the last two None without.
        eps: Added to the variance.
    """

    node: Node
    input: Node
    parts: tuple[torch.Tensor | None, ...]
    eps: float

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 factors a and shifts b of the channels."""
        mean, variance, weight, bias = (None if t is None else t.double() for t in self.parts)
        assert mean is not None and variance is not None
        factors = (variance + self.eps).rsqrt()
        factors = factors if weight is None else factors * weight.detach()
        shifts = -mean * factors
        return factors, shifts if bias is None else shifts + bias.detach()

    def is_same(self, other: BatchNorm) -> bool:
        """Whether two calls have the same statistics and parameters."""
        pairs = zip(self.parts, other.parts, strict=True)
        return self.eps == other.eps and all(a is b for a, b in pairs)


def _read(graph: GraphModule, node: Node) -> BatchNorm | str:
    """Return a batch norm, or the reason why its statistics are not fixed."""
    given = arguments(node)
    names = ("running_mean", "running_var", "weight", "bias")
    parts = tuple(read_tensor(graph, given[name]) for name in names)
    if given["training"] or given["running_mean"] is None:
        return "it computes statistics of the batch; export the model in evaluation mode"
    if any(p is None and given[name] is not None for name, p in zip(names, parts, strict=True)):
        return "its parameters are computed"
    return BatchNorm(node, given["input"], parts, given["eps"])


def _batch_norms(graph: GraphModule) -> list[BatchNorm]:
    norms = (_read(graph, node) for node in graph.graph.nodes if is_call(node, "batch_norm"))
    return [norm for norm in norms if isinstance(norm, BatchNorm)]


# ---- into the layer before ----------------------------------------------------------------------


def _layers_before(graph: GraphModule, norm: BatchNorm) -> list[Layer] | str:
    """Return the layers of one weight that a batch norm follows, or why it cannot be folded."""
    layer = read_layer(graph, norm.input)
    if layer is None:
        return "no layer is before it"
    layers = layers_of_weight(graph, layer)
    if layers is None:
        return f"something else reads the parameters of {layer.node.name}"
    for each in layers:
        [follower, *others] = each.node.users
        if others:
            return f"others read {each.node.name} too"
        other = _read(graph, follower) if is_call(follower, "batch_norm") else ""
        if isinstance(other, str) or not other.is_same(norm):
            return f"{each.node.name} has the same weight, but is not followed by this norm"
        if not each.has_channel_axis:
            return f"it does not follow the channels of {each.node.name}"
    return layers


def _fold_before(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    norm = _read(graph, node)
    assert isinstance(norm, BatchNorm)
    layers = _layers_before(graph, norm)
    assert not isinstance(layers, str)
    factors, shifts = norm.affine()
    first = layers[0]
    if first.bias is not None:
        shifts = shifts + first.bias.detach().double() * factors
    set_parameters(graph, layers, first.scale_outputs(factors), shifts)
    for layer in layers:
        replace(next(iter(layer.node.users)), layer.node)
    return layers[0].node


# ---- into the layers that follow ----------------------------------------------------------------


def _layers_behind(graph: GraphModule, norm: BatchNorm) -> list[Layer] | str:
    """Return the layers that read a batch norm, or why it cannot be folded into them."""
    layers = [read_layer(graph, user) for user in norm.node.users]
    _, shifts = norm.affine()
    for layer, user in zip(layers, norm.node.users, strict=True):
        if layer is None or layer.input is not norm.node or layer.is_transposed:
            return f"{user.name} cannot take it"
        if not layer.has_channel_axis or len(layers_of_weight(graph, layer) or ()) != 1:
            return f"something else reads the parameters of {user.name}"
        if layer.pads_zeros and bool(shifts.any()):
            return f"{user.name} pads its input with zeros, which the batch norm shifts"
    return [layer for layer in layers if layer is not None] or "nothing reads it"


def _fold_behind(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    norm = next(n for n in _batch_norms(graph) if node in n.node.users)
    layers = _layers_behind(graph, norm)
    assert not isinstance(layers, str)
    factors, shifts = norm.affine()
    for layer in layers:
        bias = layer.scale_inputs(shifts).flatten(1).sum(1)
        bias = bias if layer.bias is None else bias + layer.bias.detach().double()
        set_parameters(graph, [layer], layer.scale_inputs(factors), bias)
    replace(norm.node, norm.input)
    return layers[0].node


# ---- alone --------------------------------------------------------------------------------------


def _calls_of_norm(graph: GraphModule, norm: BatchNorm) -> list[BatchNorm] | str:
    """Return the calls of a batch norm, or why it cannot become a convolution."""
    shape = shape_of(norm.node)
    if shape is None or len(shape) not in (2, *_CONVOLUTIONS):
        return "its input is not a batch of vectors, signals, images or volumes"
    calls = [other for other in _batch_norms(graph) if other.is_same(norm)]
    return [call for call in calls if len(shape_of(call.node) or ()) == len(shape)]


def _make_depthwise(graph: GraphModule, node: Node, options: PassOptions) -> Node:
    norm = _read(graph, node)
    assert isinstance(norm, BatchNorm)
    calls = _calls_of_norm(graph, norm)
    assert not isinstance(calls, str)
    factors, shifts = norm.affine()
    rank = max(3, len(shape_of(node) or ()))
    weight = factors.view(-1, *[1] * (rank - 1))  # (channels, 1, 1, 1): a group for each channel
    parameters = [
        _insert_parameter(graph, calls, leaf, value)
        for leaf, value in (("weight", weight), ("bias", shifts))
    ]
    results = [_call_depthwise(call, rank, parameters, len(factors)) for call in calls]
    return results[0]


def _insert_parameter(
    graph: GraphModule, calls: list[BatchNorm], leaf: str, value: torch.Tensor
) -> Node:
    """Store a parameter under the name of that of a batch norm, if only the batch norm reads it."""
    norm = calls[0]
    given = arguments(norm.node)
    source = given[leaf]
    tensor = read_tensor(graph, source)
    if tensor is None:
        name = unused_name(graph, sibling_name(str(given["running_mean"].target), leaf))
    else:
        is_own = set(readers(graph, tensor)) <= {call.node for call in calls}
        name = str(source.target) if is_own else unused_name(graph, str(source.target))
    is_trained = tensor is not None and tensor.requires_grad
    parameter = nn.Parameter(value.to(fake_value(norm.input).dtype), is_trained)
    return insert_tensor(graph, norm.node, name, parameter)


def _call_depthwise(norm: BatchNorm, rank: int, parameters: list[Node], channels: int) -> Node:
    """Replace a batch norm by a convolution, and return the node with its value."""
    is_vector = rank > len(shape_of(norm.node) or ())
    x = norm.input
    if is_vector:  # (batch, channels) -> (batch, channels, 1)
        x = insert_call(norm.node, torch.ops.aten.unsqueeze.default, x, -1)
    ones, zeros = [1] * (rank - 2), [0] * (rank - 2)
    y = insert_call(norm.node, _CONVOLUTIONS[rank], x, *parameters, ones, zeros, ones, channels)
    if is_vector:
        y = insert_call(norm.node, torch.ops.aten.squeeze.dim, y, -1)
    replace(norm.node, y)
    return y


# ---- the passes ---------------------------------------------------------------------------------

Place = Layer | BatchNorm


def _finder(
    places: Callable[[GraphModule, BatchNorm], Sequence[Place] | str],
    site: Callable[[Place], Node],
) -> Callable[[GraphModule, PassOptions], Candidates]:
    """Return the ``find`` of a pass.

    Args:
        places: Returns layers or calls of a batch norm, which are rewritten together, or a reason.
        site: Returns the node to rewrite, given the first of them.
    """

    def find(graph: GraphModule, options: PassOptions) -> Candidates:
        nodes: dict[str, None] = {}
        left: dict[str, str] = {}
        for node in graph.graph.nodes:
            if is_call(node, "batch_norm"):
                norm = _read(graph, node)
                together = norm if isinstance(norm, str) else places(graph, norm)
                if isinstance(together, str):
                    left[node.name] = together
                else:
                    nodes[site(together[0]).name] = None
        return Candidates(list(nodes), left)

    return find


FOLD_INTO_LAYER_BEFORE = Pass(
    "fold a batch norm into the layer before it",
    _finder(_layers_before, lambda layer: next(iter(layer.node.users))),
    _fold_before,
)
FOLD_INTO_LAYERS_BEHIND = Pass(
    "fold a batch norm into the layers after it",
    _finder(_layers_behind, lambda layer: layer.node),
    _fold_behind,
)
MAKE_DEPTHWISE = Pass(
    "make a batch norm a depthwise convolution",
    _finder(_calls_of_norm, lambda norm: norm.node),
    _make_depthwise,
)
