"""Layers of a graph: calls of operators with parameters become modules that own the parameters.

``torch.export`` leaves calls of operators and the parameters that they read:

    conv2d(x, features.0.weight, features.0.bias, [2, 2], [1, 1])

becomes a call of the module ``features.0``, an ``nn.Conv2d`` with these parameters. So graphs have
the same layers as other models, and everything that quantizes layers quantizes graphs too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from quark.torch.quantization.graph_mode.nodes import (
    call_functions,
    module_path,
    module_type,
    operator_name,
)
from quark.torch.quantization.graph_mode.passes.graph_edits import arguments, fake_value, get_member
from quark.torch.quantization.nn.operators import is_operator

logger = logging.getLogger(__name__)


class _Layer(NamedTuple):
    """A call of an operator that a module can take the place of.

    Attributes:
        kind: Class of the module.
        input: Node of the input.
        weight: Node of the weight.
        bias: Node of the bias, or None.
        options: Other arguments of the module, such as the stride.
    """

    kind: type[nn.Module]
    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    options: dict[str, Any]


def raise_layers(graph: fx.GraphModule) -> fx.GraphModule:
    """Replace calls of operators with parameters by layers, in place, and return the graph.

    A layer has the name of the module that owned the parameters in the model. Calls with the same
    parameters and options become calls of one layer.

    Args:
        graph: Result of ``rewrite``.
    """
    names: dict[tuple[Any, ...], str] = {}
    for node in list(call_functions(graph)):
        layer = _recognize(node)
        if layer is None or not is_operator(layer.kind):
            continue
        options = tuple(sorted((name, str(value)) for name, value in layer.options.items()))
        bias = None if layer.bias is None else layer.bias.target
        key = (layer.kind, layer.weight.target, bias, options)
        if key not in names:
            names[key] = _vacant_name(graph, node, layer)
            graph.add_submodule(names[key], _build(graph, layer))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(names[key], (layer.input,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
    _remove_unused(graph)
    return graph


def _recognize(node: fx.Node) -> _Layer | None:
    """Return the layer that a call of an operator stands for, or None."""
    recognize = _OPERATORS.get(operator_name(node))
    layer = None if recognize is None else recognize(arguments(node))
    if layer is None:
        return None
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    return layer if all(p.op == "get_attr" for p in parameters) else None


def _linear(given: dict[str, Any]) -> _Layer:
    return _Layer(nn.Linear, given["input"], given["weight"], given["bias"], {})


def _addmm(given: dict[str, Any]) -> _Layer | None:
    weight = _transposed(given["mat2"])
    is_plain = given["beta"] == 1 and given["alpha"] == 1
    if weight is None or not is_plain or given["self"].meta["val"].dim() != 1:
        return None
    return _Layer(nn.Linear, given["mat1"], weight, given["self"], {})


def _matmul(given: dict[str, Any]) -> _Layer | None:
    x, other = given.values()
    weight = _transposed(other)
    return None if weight is None else _Layer(nn.Linear, x, weight, None, {})


def _transposed(node: fx.Node) -> fx.Node | None:
    """Return the parameter of two axes that a node transposes, or None."""
    source = node.args[0] if operator_name(node) in _TRANSPOSES else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    before, after = fake_value(source), fake_value(node)
    if before is None or after is None or before.dim() != 2:
        return None
    is_swap = before.t().shape == after.shape and before.t().stride() == after.stride()
    return source if is_swap else None


def _convolution(
    dims: int | None, is_transposed: bool
) -> Callable[[dict[str, Any]], _Layer | None]:
    """Return what recognizes a convolution; None dims and ``transposed`` are read from the call."""

    def recognize(given: dict[str, Any]) -> _Layer | None:
        rank = dims or given["weight"].meta["val"].dim() - 2
        kinds = _TRANSPOSED if given.get("transposed", is_transposed) else _CONVOLUTIONS
        names = ["stride", "padding", "dilation", "groups"]
        if kinds is _TRANSPOSED:
            names.append("output_padding")
        options = {name: _option(given[name], rank) for name in names}
        kind = kinds.get(rank)
        if kind is None:
            return None
        return _Layer(kind, given["input"], given["weight"], given["bias"], options)

    return recognize


def _option(value: Any, rank: int) -> Any:
    """Return an option of a convolution as modules take it: [1] for two axes is (1, 1)."""
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(value) * (rank if len(value) == 1 else 1)


def _embedding(given: dict[str, Any]) -> _Layer:
    options = {k: given[k] for k in ("padding_idx", "scale_grad_by_freq", "sparse")}
    options["padding_idx"] = None if given["padding_idx"] < 0 else given["padding_idx"]
    return _Layer(nn.Embedding, given["indices"], given["weight"], None, options)


_TRANSPOSES = {"t", "numpy_T", "transpose", "permute"}
_CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, type[nn.Module]] = {
    1: nn.ConvTranspose1d,
    2: nn.ConvTranspose2d,
    3: nn.ConvTranspose3d,
}
# Operator -> what returns the layer that a call with these arguments stands for, or None.
_OPERATORS: dict[str, Callable[[dict[str, Any]], _Layer | None]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _matmul,
    "matmul": _matmul,
    "embedding": _embedding,
    "convolution": _convolution(None, False),
    **{f"conv{n}d": _convolution(n, False) for n in _CONVOLUTIONS},
    **{f"conv_transpose{n}d": _convolution(n, True) for n in _TRANSPOSED},
}


def _build(graph: fx.GraphModule, layer: _Layer) -> nn.Module:
    """Return the module of a layer, with the parameters of the graph."""
    weight = get_member(graph, str(layer.weight.target))
    bias = None if layer.bias is None else get_member(graph, str(layer.bias.target))
    options: dict[str, Any] = {} if layer.kind is nn.Embedding else {"bias": bias is not None}
    with torch.device("meta"):
        module = layer.kind(*_sizes(layer, weight), **options, **layer.options)
    module.weight = _parameter(weight)
    if bias is not None:
        module.bias = _parameter(bias)
    return module.eval()


def _sizes(layer: _Layer, weight: torch.Tensor) -> tuple[Any, ...]:
    """Return the channels of a layer, and the size of the kernel of a convolution."""
    first, second, *kernel = weight.shape
    if layer.kind is nn.Embedding:
        return first, second
    if not kernel:
        return second, first
    groups = layer.options["groups"]
    channels = (
        (first, second * groups)
        if layer.kind in _TRANSPOSED.values()
        else (
            second * groups,
            first,
        )
    )
    return *channels, tuple(kernel)


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    is_parameter = isinstance(tensor, nn.Parameter)
    return tensor if is_parameter else nn.Parameter(tensor, requires_grad=False)  # type: ignore[return-value]


def _vacant_name(graph: fx.GraphModule, node: fx.Node, layer: _Layer) -> str:
    """Return the name of a new layer.

    It is the name of the module that ran the operator, if the layer is of its class, else of the
    module that owned the weight: they differ for tied weights. If that has other contents, such as
    the packed projections of ``nn.MultiheadAttention``, the name of the parameter is added.
    """
    owner, _, parameter = str(layer.weight.target).rpartition(".")
    own = {
        id(get_member(graph, str(p.target))) for p in (layer.weight, layer.bias) if p is not None
    }
    stem = parameter.removesuffix("weight").strip("_") or node.name
    inner = f"{owner}.{stem}" if owner else stem
    is_whole = module_type(node) == f"{layer.kind.__module__}.{layer.kind.__qualname__}"
    whole = module_path(node) if is_whole else owner
    candidates = [whole, owner, inner, f"{inner}_{node.name}"]
    return next(name for name in candidates if name and _is_vacant(graph, name, own))


def _is_vacant(graph: fx.GraphModule, name: str, own: set[int]) -> bool:
    """Whether a name stands for nothing, or for a mere holder of parameters with these ids."""
    parent: Any = graph
    for part in name.split("."):
        if not isinstance(parent, nn.Module):
            return False
        if not hasattr(parent, part):
            return True
        parent = getattr(parent, part)
    if type(parent) is not nn.Module or parent._modules:
        return False
    contents = [*parent._parameters.values(), *parent._buffers.values()]
    return {id(tensor) for tensor in contents} <= own


def _remove_unused(graph: fx.GraphModule) -> None:
    """Remove parameters, buffers and modules that no node reads any more."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.graph.erase_node(node)
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for path, module in graph.named_modules():
        if module is not graph and type(module) is not nn.Module:
            continue
        for name in [*module._parameters, *module._buffers]:
            if (f"{path}.{name}" if path else name) not in used:
                delattr(module, name)
    graph.delete_all_unused_submodules()
    graph.graph.lint()
    graph.recompile()
