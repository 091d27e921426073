"""Quantized graphs as programs of ``torch.export`` with the operators ``quantized_decomposed``.

Compilers of torch recognize quantized graphs by these operators: Inductor on x86, ExecuTorch with
XNNPACK, OpenVINO. An edge and a convolution become

    quantize_per_tensor(x, 0.02, 0, -128, 127, int8) -> dequantize_per_tensor -> conv2d -> …
    dequantize_per_channel(codes, scales, zero_points, 0, -128, 127, int8) ↗

OpenVINO reads no codes of weights. It gets values of weights, and a quantize_per_channel before the
dequantize_per_channel. It also computes a convolution and the residual sum after it at once:

    q(dq(q(conv(x))) + y)    becomes    q(conv(x) + y)

without the first rounding, where that is the first operation after the convolution. So OpenVINO
gets an identity there, leaky_relu with the slope 1, which it computes in the same operation:

    q(dq(q(leaky_relu(conv(x), 1))) + y)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from quark.torch.export.graph_archive import (
    check_frozen_graph,
    dynamic_shapes,
    graph_layers,
    remove_source_lines,
)
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.value_types import check_types
from quark.torch.quantization.graph_mode.edges import edge_modules, edge_quantizers
from quark.torch.quantization.graph_mode.inputs import check_arguments
from quark.torch.quantization.graph_mode.nodes import operator_name
from quark.torch.quantization.graph_mode.passes.graph_edits import deep_copy
from quark.torch.quantization.nn.layer import QuantizedLayer
from quark.torch.quantization.nn.quantizer import QuantizedTensor

_TYPES = {(True, 8): torch.int8, (False, 8): torch.uint8, (True, 16): torch.int16}
_TYPES |= {(False, 16): torch.uint16}
_SUPPORTED = (
    "integers up to 16 bits: inputs and outputs with one static scale, weights with one scale or "
    "one per channel"
)


def export_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    fold_quantize: bool = True,
) -> torch.export.ExportedProgram:
    """Return a frozen graph as a program with ``torch.ops.quantized_decomposed`` operators.

    The program gives the bits of the graph in torch. Biases are values: where the graph has int32
    biases, these are multiples of the scale of weight times input, so compilers that compute the
    codes again get the same codes. Axes of any size stay so.

    Args:
        model: A frozen graph. It is not changed.
        args: Example of the arguments.
        kwargs: Example of keyword arguments.
        fold_quantize: Whether weights are codes, as Inductor and XNNPACK take them. Otherwise they
            are quantized values in float32, which the program quantizes, as OpenVINO takes them;
            and an identity, ``leaky_relu`` with the slope 1, stands between a convolution and its
            quantizer in front of a sum, so that OpenVINO does not leave out this rounding.

    Raises:
        ImportError: This version of torch does not have the operators.
        TypeError: The model is no graph, or an argument has another type.
        ValueError: It is not quantized or not frozen, or the operators cannot express how a tensor
            is quantized.
    """
    check_types(bool, fold_quantize=fold_quantize)
    graph = check_frozen_graph(model)
    check_arguments(graph, args, kwargs)
    _check(graph)
    _register_operators()
    copied = deep_copy(graph)
    layers = graph_layers(copied)
    if not fold_quantize:
        _separate_sums(copied, layers)
    _replace_edges(copied)
    for name, layer in layers.items():
        copied.set_submodule(name, _Layer(layer, fold_quantize))
    kwargs = kwargs or {}
    shapes = dynamic_shapes(graph, kwargs)
    with torch.no_grad():
        program = torch.export.export(copied.eval(), args, kwargs, dynamic_shapes=shapes)
    remove_source_lines(program)
    return program


def _separate_sums(graph: fx.GraphModule, layers: Mapping[str, QuantizedLayer]) -> None:
    """Insert an identity between convolutions and their quantizers in front of sums, in place."""
    edges = edge_modules(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or str(node.target) not in edges:
            continue
        layer = layers.get(str(node.args[0].target))
        weight = None if layer is None else layer.value("weight")
        is_convolution = weight is not None and weight.dim() > 2
        if is_convolution and any(operator_name(reader) == "add" for reader in node.users):
            with graph.graph.inserting_before(node):
                identity = torch.ops.aten.leaky_relu.default
                same = graph.graph.call_function(identity, (node.args[0], 1.0))
            node.replace_input_with(node.args[0], same)


def _replace_edges(graph: fx.GraphModule) -> None:
    """Replace the quantizers on the edges of a graph by operators, in place.

    Every reader of a value gets a dequantize_per_tensor of its own, as compilers expect it:
    XNNPACK makes one part of the program of an operator with the dequantization of its inputs.
    """
    operators = torch.ops.quantized_decomposed
    edges = edge_modules(graph)
    for node in list(graph.graph.nodes):
        quantizer = edges.get(str(node.target)) if node.op == "call_module" else None
        if quantizer is None:
            continue
        assert quantizer.scale is not None
        value = node.meta["val"]
        arguments = _per_tensor(quantizer.scale, quantizer.zero_point, quantizer.scheme)
        with graph.graph.inserting_before(node):
            given = (node.args[0], *arguments)
            codes = graph.graph.call_function(operators.quantize_per_tensor.default, given)
        for reader in list(node.users):
            with graph.graph.inserting_before(reader):
                given = (codes, *arguments)
                read = graph.graph.call_function(operators.dequantize_per_tensor.default, given)
                if value.dtype != torch.float32:
                    read = graph.graph.call_function(torch.ops.aten.to.dtype, (read, value.dtype))
            reader.replace_input_with(node, read)
        graph.graph.erase_node(node)
    graph.delete_all_unused_submodules()
    graph.recompile()


class _Layer(nn.Module):
    """A layer with the same outputs as a quantized one, whose weight is dequantized on use."""

    weight: Any
    bias: torch.Tensor | None

    def __init__(self, layer: QuantizedLayer, fold_quantize: bool) -> None:
        super().__init__()
        self._product = layer.product
        state, weight = layer.quantized_tensor("weight"), layer.value("weight")
        assert weight is not None
        if state is None:
            self.register_buffer("weight", weight.detach())
        else:
            self.weight = _Weight(state, weight.dtype, fold_quantize)
        bias = layer.value("bias")
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of the quantized layer."""
        weight = self.weight() if isinstance(self.weight, _Weight) else self.weight
        return self._product(x, weight, self.bias)


class _Weight(nn.Module):
    """The codes of a weight, or its quantized values in float32, from which codes are computed."""

    def __init__(self, state: QuantizedTensor, dtype: torch.dtype, fold_quantize: bool) -> None:
        super().__init__()
        assert state.codes is not None and state.scale is not None
        scheme, scale, zeros = state.scheme, state.scale, state.zero_point
        self._dtype = dtype
        self._kind = "per_tensor" if scheme.qscheme is QSchemeType.per_tensor else "per_channel"
        if scheme.qscheme is QSchemeType.per_tensor:
            self._arguments: tuple[Any, ...] = _per_tensor(scale, zeros, scheme)
        else:
            zeros = torch.zeros_like(scale) if zeros is None else zeros
            self.register_buffer("scale", scale.float())
            self.register_buffer("zero_point", zeros.to(torch.int64))
            self._arguments = (scheme.axis % state.codes.dim(), *_limits(scheme))
        codes = state.codes.to(_code_type(scheme))
        if fold_quantize:
            self.register_buffer("codes", codes)
        else:
            self.register_buffer("values", self._call("dequantize", codes))

    def forward(self) -> torch.Tensor:
        """Return the values."""
        has_codes = "codes" in self._buffers
        codes = self.codes if has_codes else self._call("quantize", self.values)
        values = self._call("dequantize", codes)
        return values if values.dtype == self._dtype else values.to(self._dtype)

    def _call(self, name: str, x: Any) -> torch.Tensor:
        """Call quantize or dequantize with the scales of the weight."""
        operator = getattr(torch.ops.quantized_decomposed, f"{name}_{self._kind}")
        scales = (self.scale, self.zero_point) if self._kind == "per_channel" else ()
        result: torch.Tensor = operator.default(x, *scales, *self._arguments)
        return result


def _per_tensor(
    scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> tuple[float, int, int, int, torch.dtype]:
    """Return the arguments of ``quantize_per_tensor`` after the tensor."""
    zeros = 0 if zero_point is None else int(zero_point)
    return float(scale), zeros, *_limits(scheme)


def _limits(scheme: Scheme) -> tuple[int, int, torch.dtype]:
    """Return the smallest and the largest code, and their type."""
    return scheme.fmt.qmin, scheme.fmt.qmax, _code_type(scheme)


def _code_type(scheme: Scheme) -> torch.dtype:
    """Return the type of codes: a byte or two, also for fewer bits."""
    return _TYPES[scheme.fmt.signed, 8 if scheme.fmt.bits <= 8 else 16]


def _check(graph: fx.GraphModule) -> None:
    """Check that the operators can express how every tensor is quantized.

    Raises:
        ValueError: They cannot.
    """
    for name, quantizer in edge_quantizers(graph).items():
        _refuse(f"the edge {name}", _problem(quantizer.spec, is_weight=False))
    for name, layer in graph_layers(graph).items():
        spec = layer.quant_config.weight
        if spec is not None:
            _refuse(f"the weight of {name}", _problem(spec, is_weight=True))


def _problem(spec: QuantizationSpec, is_weight: bool) -> str | None:
    """Return the part of a specification that the operators have no form for; None if all have."""
    scheme = spec.scheme
    fmt, qscheme = scheme.fmt, scheme.qscheme
    is_integer = fmt.scaled and not fmt.is_float and fmt.bits <= 16
    if not is_integer or scheme.shares_exponents:
        return f"the format {spec.dtype.name}"
    if spec.quantizes_codes:
        return "two stages"
    if scheme.float_zero_point:
        return "float zero points"
    if is_weight:
        is_simple = qscheme in (QSchemeType.per_tensor, QSchemeType.per_channel)
        return None if is_simple else f"scales {qscheme.name}"
    if spec.is_dynamic or qscheme is not QSchemeType.per_tensor:
        return "other scales than one static scale"
    is_rounded = scheme.rounding is RoundType.half_even
    return None if is_rounded else f"rounding by {scheme.rounding.name}"


def _refuse(where: str, problem: str | None) -> None:
    if problem:
        raise ValueError(
            f"{where} has {problem}, for which quantized_decomposed has no operator: it has "
            f"operators for {_SUPPORTED}. Quantize it so, exclude it, or write the graph with "
            "save_params or export_onnx."
        )


def _register_operators() -> None:
    """Register ``torch.ops.quantized_decomposed``, which torch does on import of a module.

    Raises:
        ImportError: This version of torch does not have it.
    """
    try:
        import torch.ao.quantization.fx._decomposed
    except ImportError:
        raise ImportError(
            f"torch {torch.__version__} does not have the operators quantized_decomposed: install "
            "the version of constraints.txt."
        ) from None
