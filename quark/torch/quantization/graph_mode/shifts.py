"""Power-of-two scales that an integer-only device can move between by shifts; see ``ShiftLimits``.

A scale 2**-p has the position p. A layer with positions i of the input, w of the weight and o of
the output adds products in units of 2**-(w + i), so its result is the sum shifted right by
w + i - o. Example: i = 5, w = 8, o = 4 is a shift by 9.

A shift outside of its limits is corrected by a coarser scale, never by a finer one, so no value is
cut:

- a shift that is too small makes the output coarser, or the bias;
- one that is too large makes the weight coarser; in operators without weight, an input.

A scale that changes moves the shifts of other operators. So all operators are visited again until
none changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import fx

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.graph import ShiftLimits
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.graph_mode.edges import edge_quantizer
from quark.torch.quantization.graph_mode.nodes import is_aten, operator_name
from quark.torch.quantization.graph_mode.operators import CLAMPS
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from quark.torch.quantization.nn.quantizer import TensorQuantizer

_SUMS = {"add", "sub", "rsub"}
_PRODUCTS = {"matmul", "mm", "bmm", "linear", "conv1d", "conv2d", "conv3d", "convolution"}
_POOLS = {"mean", *(f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))}
_SWEEPS = 200  # more than any chain of corrections needs; cycles without solution never end


class _Operator(NamedTuple):
    """An operator whose integers are shifted.

    Attributes:
        name: Name of its node.
        kind: ``layer``, or the name of an operator of torch.
        inputs: Quantizers of the inputs, in the order of the arguments.
        outputs: Quantizers of the output.
        weight: Quantizer of the weight of a layer.
        bias: Quantizer of the bias of a layer.
    """

    name: str
    kind: str
    inputs: list[TensorQuantizer]
    outputs: list[TensorQuantizer]
    weight: TensorQuantizer | None = None
    bias: TensorQuantizer | None = None


class _Shift(NamedTuple):
    """A number of bits: the sum of the positions of ``added`` less that of ``subtracted``.

    Attributes:
        kind: Field of ``ShiftLimits``.
        added: Quantizers whose positions are added.
        subtracted: Quantizer that becomes coarser if the shift is too small.
        coarsened: Quantizer that becomes coarser if the shift is too large.
        limits: Smallest and largest shift.
    """

    kind: str
    added: list[TensorQuantizer]
    subtracted: TensorQuantizer
    coarsened: TensorQuantizer
    limits: tuple[float, float]


_Positions = dict[TensorQuantizer, int]


def check_shift_specs(configs: Mapping[fx.Node, QuantizationConfig], graph: fx.GraphModule) -> None:
    """Check that all scales of a graph will be powers of two, one for each tensor.

    Args:
        configs: Configuration of layers and operators.
        graph: A graph with layers.

    Raises:
        ValueError: A specification gives other scales, or a tensor has none.
    """
    for node, config in configs.items():
        needed = ["input_tensors", "output_tensors"]
        if node.op == "call_module":
            needed.append("weight")
            if getattr(graph.get_submodule(str(node.target)), "bias", None) is not None:
                needed.append("bias")
        for name in needed:
            spec = getattr(config, name)
            if spec is None or not _is_shiftable(spec, is_bias=name == "bias"):
                given = "none" if spec is None else f"{spec.dtype.name}, {spec.scheme.text}"
                raise ValueError(
                    f"shift_limits: {node.name} needs a specification of {name} with integers, one "
                    "static symmetric scale per tensor, and scale_type='pof2' (int32 biases have "
                    f"the scale of the sum anyway), got {given}."
                )


def _is_shiftable(spec: QuantizationSpec, is_bias: bool) -> bool:
    scheme = spec.scheme
    is_integer = scheme.fmt.scaled and not scheme.fmt.is_float and not spec.quantizes_codes
    is_per_tensor = scheme.qscheme is QSchemeType.per_tensor and not spec.is_dynamic
    is_power = scheme.scale.power_of_two or (is_bias and spec.dtype is Dtype.int32)
    return is_integer and is_per_tensor and scheme.symmetric and is_power


@torch.no_grad()
def apply_shift_limits(graph: fx.GraphModule, limits: ShiftLimits) -> None:
    """Make scales of a graph coarser until every shift is within its limits.

    Parameters that are frozen already are rounded again if their scale changes.

    Args:
        graph: A calibrated graph with power-of-two scales.
        limits: The limits.

    Raises:
        ValueError: No coarser scales keep the limits.
    """
    operators = list(_operators(graph))
    positions: _Positions = {}
    for operator in operators:
        for quantizer in [*operator.inputs, *operator.outputs, operator.weight, operator.bias]:
            if quantizer is not None:
                positions[quantizer] = _position(quantizer)
    before, misfit = dict(positions), ""
    for _ in range(_SWEEPS):
        corrections = [_correct(operator, positions, limits) for operator in operators]
        misfit = next(filter(None, corrections), "")
        if not misfit:
            break
    if misfit:
        raise ValueError(
            f"No scales keep the limits of shifts: {misfit}. Widen shift_limits, or exclude it."
        )
    changed = {q: p for q, p in positions.items() if p != before[q]}
    for quantizer, position in changed.items():
        assert quantizer.scale is not None
        quantizer.scale = torch.full_like(quantizer.scale, 2.0**-position)
    for layer in graph.modules():
        if isinstance(layer, FakeQuantizedLayer) and layer.frozen:
            for name, quantizer in layer.parameter_quantizers().items():
                if quantizer in changed:
                    quantizer.freeze_(getattr(layer, name))


def _correct(operator: _Operator, positions: _Positions, limits: ShiftLimits) -> str:
    """Lower positions so that the shifts of an operator are within limits; return the last change.

    Returns:
        What was changed, for messages; "" if nothing was.
    """
    misfit = ""
    for shift in _shifts(operator, positions, limits):
        value = sum(positions[q] for q in shift.added) - positions[shift.subtracted]
        smallest, largest = shift.limits
        if value < smallest:
            positions[shift.subtracted] -= int(smallest) - value
        elif value > largest:
            positions[shift.coarsened] -= value - int(largest)
        else:
            continue
        misfit = f"the {shift.kind} shift of {operator.name} is {value}, not in {shift.limits}"
    return misfit


def _shifts(operator: _Operator, positions: _Positions, limits: ShiftLimits) -> Iterator[_Shift]:
    """Iterate over the shifts of an operator; changes of positions meanwhile are respected."""
    inputs, weight, bias = operator.inputs, operator.weight, operator.bias
    for output in operator.outputs:
        if weight is not None:
            yield _Shift("cut", [inputs[0], weight], output, weight, limits.cut)
        elif operator.kind in _PRODUCTS and len(inputs) > 1:
            largest = max(inputs, key=positions.__getitem__)
            yield _Shift("cut", inputs, output, largest, limits.cut)
        elif operator.kind == "mul" and len(inputs) > 1:
            largest = max(inputs, key=positions.__getitem__)
            yield _Shift("product", inputs, output, largest, limits.product)
        elif operator.kind in _POOLS:
            yield _Shift("pool", inputs, output, inputs[0], limits.pool)
        elif operator.kind in _SUMS:
            largest = max(inputs, key=positions.__getitem__)
            smallest = min(inputs, key=positions.__getitem__)
            yield _Shift("read", [largest], smallest, largest, (0, limits.read[1]))
            yield _Shift("write", [smallest], output, smallest, limits.write)
        if bias is not None:
            # w + i - b >= bias + cut  <=>  o - b >= bias, as the cut is w + i - o.
            yield _Shift("bias", [output], bias, output, (limits.bias[0], math.inf))
    if weight is not None and bias is not None:
        # An int32 bias keeps the scale of the sum.
        least = 0 if bias.spec.dtype is Dtype.int32 else -math.inf
        yield _Shift("bias", [inputs[0], weight], bias, weight, (least, limits.bias[1]))


def _operators(graph: fx.GraphModule) -> Iterator[_Operator]:
    """Iterate over the operators of a graph that shift integers, in its order."""
    for node in graph.graph.nodes:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        given = [edge_quantizer(graph, x) for x in [*node.args, *node.kwargs.values()]]
        inputs = [q for q in given if q is not None]
        outputs = list(dict.fromkeys(_output_quantizers(graph, node)))
        if isinstance(layer, FakeQuantizedLayer) and layer.weight_quantizer is not None and inputs:
            weight, bias = layer.weight_quantizer, layer.bias_quantizer
            yield _Operator(node.name, "layer", inputs, outputs, weight, bias)
        elif is_aten(node) and inputs:
            yield _Operator(node.name, operator_name(node), inputs, outputs)


def _output_quantizers(graph: fx.GraphModule, node: fx.Node) -> Iterator[TensorQuantizer]:
    """Iterate over the quantizers of the result of a node, after the clamp that it ends with."""
    for user in node.users:
        quantizer = edge_quantizer(graph, user)
        if quantizer is not None:
            yield quantizer
        elif operator_name(user) in CLAMPS:
            yield from _output_quantizers(graph, user)


def _position(quantizer: TensorQuantizer) -> int:
    """Return p of a scale 2**-p."""
    assert quantizer.scale is not None
    fraction, exponent = math.frexp(float(quantizer.scale))
    assert fraction == 0.5, "scales of power-of-two specifications are powers of two"
    return 1 - exponent
