"""Questions about quantized layers that several algorithms ask, and operations on their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quark.torch.graph.block_selection import is_inside
from quark.torch.graph.parameter_writes import write_
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.pipeline.context import Context
from quark.torch.quantization.config.algo import AlgoConfig
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer

PANEL = 256  # columns of the parts in which errors are computed

Predicate = Callable[[QuantizationConfig], bool]


# ---- configurations of layers -------------------------------------------------------------------


def has_quantized_weight(config: QuantizationConfig) -> bool:
    """Whether a layer rounds its weight to a format with scales."""
    return config.weight is not None and config.weight.fmt.scaled


def has_quantized_input(config: QuantizationConfig) -> bool:
    """Whether a layer rounds its inputs to a format with scales."""
    spec = config.input_tensors
    return spec is not None and spec.fmt.scaled


def check_weights_quantized(options: AlgoConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if no layer has a quantized weight, which the algorithm needs.

    Raises:
        ValueError: No weight is quantized to a format with scales.
    """
    if not any(map(has_quantized_weight, layers.values())):
        raise ValueError(_not_applicable(options, "weights"))


def check_inputs_quantized(options: AlgoConfig, layers: Mapping[str, QuantizationConfig]) -> None:
    """Raise if no layer has quantized inputs, which the algorithm needs.

    Raises:
        ValueError: No input is quantized to a format with scales.
    """
    if not any(map(has_quantized_input, layers.values())):
        raise ValueError(_not_applicable(options, "inputs (input_tensors)"))


def _not_applicable(options: AlgoConfig, tensors: str) -> str:
    return (
        f"{options.name} applies to none of the layers to be quantized: it needs {tensors} in a "
        "format with scales. Change the scheme, or leave the algorithm out."
    )


def block_layers(
    context: Context, block: str, predicate: Predicate
) -> dict[str, FakeQuantizedLayer]:
    """Return the layers of a block whose configuration satisfies a predicate, by name."""
    inside = {n: m for n, m in context.layers.items() if is_inside(n, block)}
    return {name: layer for name, layer in inside.items() if predicate(layer.quant_config)}


# ---- weights as matrices ------------------------------------------------------------------------


def to_matrix(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a weight as a matrix (outputs, inputs), given the axis of its inputs."""
    return weight.movedim(axis, -1).flatten(0, -2)


def weight_matrix(layer: FakeQuantizedLayer) -> torch.Tensor:
    """Return the weight of a layer as a float32 matrix (outputs, inputs)."""
    return layer.to_matrix(layer.weight.detach()).float()


def write_weight_matrix_(layer: FakeQuantizedLayer, matrix: torch.Tensor) -> None:
    """Replace the weight of a layer by a matrix (outputs, inputs), in place."""
    write_(layer.weight, layer.from_matrix(matrix))


def split_rows(outputs: int, groups: int) -> list[slice]:
    """Return the rows of a matrix that meet each group of inputs.

    Example: 6 outputs in 3 groups -> rows 0:2, 2:4 and 4:6.
    """
    size = outputs // groups
    return [slice(group * size, (group + 1) * size) for group in range(groups)]


def group_width(scheme: Scheme, inputs: int) -> int:
    """Return how many adjacent weights of a row share a scale at most."""
    if scheme.fmt.block:
        return scheme.fmt.block
    if scheme.qscheme is QSchemeType.per_group and scheme.group > 0:
        return scheme.group
    if scheme.qscheme is QSchemeType.per_block and scheme.block is not None and scheme.block[1] > 0:
        return scheme.block[1]
    return inputs


def has_scales_per_row(layer: FakeQuantizedLayer) -> bool:
    """Whether each scale of the weight belongs to one row of its matrix, or to a part of one row.

    In the weight of a transposed convolution, outputs of all groups share the second axis, and
    adjacent values belong to several outputs.
    """
    assert layer.weight_quantizer is not None
    scheme = layer.weight_quantizer.scheme
    is_transposed = layer.is_convolution and layer.is_transposed
    if scheme.qscheme is QSchemeType.per_channel:
        outputs = int(is_transposed) if layer.is_convolution else 1 - layer.input_axis
        is_shared = is_transposed and layer.channel_groups > 1
        return scheme.axis % layer.weight.dim() == outputs and not is_shared
    is_along_inputs = scheme.axis % 2 == layer.input_axis
    return scheme.qscheme is QSchemeType.per_group and is_along_inputs and not is_transposed


def rounds_rows_apart(layer: FakeQuantizedLayer) -> bool:
    """Whether some rows of the matrix of a layer are rounded alone as they are among the others.

    All rows share a tensor scale, and the weight of a convolution has no part of rows.
    """
    assert layer.weight_quantizer is not None
    spec = layer.weight_quantizer.spec
    is_shared = spec.scheme.scale.two_level or spec.quantizes_codes
    return has_scales_per_row(layer) and not is_shared and not layer.is_convolution


# ---- errors and final values --------------------------------------------------------------------


def output_error(change: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the squared error of the outputs, summed over all tokens: tr(D G Dᵀ), [].

    Args:
        change: Change D of the weight, (outputs, inputs).
        gram: Sum G of x xᵀ over the inputs x, (inputs, inputs).
    """
    total = change.new_zeros(())
    for start in range(0, len(gram), PANEL):
        own, later = slice(start, start + PANEL), slice(start + PANEL, None)
        # G is symmetric: what later columns add to these is also what these add to later ones.
        product = change[:, own] @ gram[own, own]
        product.addmm_(change[:, later], gram[later, own], alpha=2)
        total += product.mul_(change[:, own]).sum()
    return total


def fake_quantized_weight(layer: FakeQuantizedLayer, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as the quantizer of a layer would round it."""
    return (
        weight
        if layer.weight_quantizer is None
        else layer.weight_quantizer.fake_quantize_copy(weight)
    )


def freeze(layer: FakeQuantizedLayer) -> None:
    """Mark a layer as frozen whose weight holds quantized values already; freeze its bias too."""
    quantizer = layer.bias_quantizer
    if quantizer is not None:
        quantizer.observer(layer.bias)
        quantizer.compute_scales(layer.bias)
        write_(layer.bias, quantizer.freeze_(layer.bias.detach().clone()))
    layer.frozen = True
