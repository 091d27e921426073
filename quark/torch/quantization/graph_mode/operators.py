"""Operators of a graph whose inputs and outputs can be quantized."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from quark.torch.quantization.graph_mode.nodes import (
    is_aten,
    is_float_tensor,
    operator_name,
)
from quark.torch.quantization.graph_mode.passes.graph_edits import arguments

# Operators, beside layers, that compute with quantized tensors.
QUANTIZED = {
    # arithmetic
    *("add", "sub", "rsub", "mul", "div", "maximum", "minimum"),
    # products of two activations, and layers whose weight is not a parameter
    *("matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "scaled_dot_product_attention"),
    *("conv1d", "conv2d", "conv3d", "convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    # joining and pooling
    *("cat", "concat", "stack", "mean"),
    *("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
}
# Activations that integer products end with, by limits on their codes. The product before such an
# activation is not rounded.
CLAMPS = {"relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max"}
# Activations of one value each. Some devices compute them together with the product before them.
ACTIVATIONS = {
    *("leaky_relu", "prelu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "sigmoid"),
    *("log_sigmoid", "tanh", "hardswish", "hardsigmoid"),
    *CLAMPS,
}
QUANTIZED |= ACTIVATIONS
# Arguments of operators that stay in float: sums have their bias, products their mask.
_IN_FLOAT = {"bias", "attn_mask"}
# Runtimes compute PReLU in float, and one scale for slopes of very different sizes loses much.
_SLOPES = {"prelu": "weight"}


def is_quantizable(node: fx.Node) -> bool:
    """Whether a node calls an operator that computes floats and has a quantized form."""
    is_listed = operator_name(node) in QUANTIZED
    return is_listed and any(map(is_float_tensor, [*results(node), *float_inputs(node)]))


def float_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the floating-point tensors that a layer or an operator reads, each once."""
    if is_aten(node):
        in_float = {*_IN_FLOAT, _SLOPES.get(operator_name(node))}
        given: Any = {k: v for k, v in arguments(node).items() if k not in in_float}
    else:
        given = (node.args, node.kwargs)
    return list(dict.fromkeys(leaf for leaf in tree_leaves(given) if is_float_tensor(leaf)))


def results(node: fx.Node) -> Iterator[fx.Node]:
    """Iterate over the nodes that hold the result tensors of a node: itself, or its parts."""
    if is_float_tensor(node):
        yield node
    else:
        yield from (n for n in node.users if n.target is operator.getitem and is_float_tensor(n))
