"""Checks whether a format can hold a quantized layer.

A check returns the problem as a clause ("its input is rotated"), or None. ``describe_problems``
joins the problems of all layers into one message.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from quark.torch.export.formats.config_section import IN_BLOCKS
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.nn.layer import QuantizedLayer


def describe_problems(problems: Mapping[str, str | None]) -> str:
    """Return one clause per distinct problem, naming a first layer; "" if there is no problem.

    Example: ``model.layers.0.mlp.up_proj and 6 more: its input is quantized``.
    """
    layers: dict[str, list[str]] = {}
    for name, problem in problems.items():
        if problem:
            layers.setdefault(problem, []).append(name)
    return "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {problem}"
        for problem, names in layers.items()
    )


def common_problem(
    layer: QuantizedLayer,
    classes: tuple[type[nn.Module], ...],
    holds_rotation: bool = False,
    holds_float: bool = False,
) -> str | None:
    """Return why a format of another tool cannot hold a layer, whatever its number format.

    Args:
        layer: A quantized layer.
        classes: Supported float classes.
        holds_rotation: Whether the format can hold a rotation of inputs.
        holds_float: Whether it can hold a weight in float.
    """
    if layer.float_class not in classes:
        supported = " or ".join(cls.__name__ for cls in classes)
        return f"it is a {layer.float_class.__name__}, not a {supported}"
    if layer.input_rotation is not None and not holds_rotation:
        return "its input is rotated"
    if layer.low_rank_up is not None:
        return "it has a low-rank branch"
    if layer.input_prescale is not None:
        return "its input is multiplied by factors"
    specs = [spec for _, spec in layer.quant_config.specs()]
    if any(spec.four_over_six for spec in specs):
        return "readers do not choose scales of inputs between 4 and 6 (four_over_six)"
    if layer.quant_config.weight is None and not holds_float:
        return "its weight is not quantized"
    if layer.quant_config.bias is not None:
        return "its bias is quantized"
    return None


def check_name_parts(mode: str, layers: Collection[str], float_layers: Collection[str]) -> None:
    """Check that a format that excludes layers by parts of names can exclude all float layers.

    Example: "mlp.gate" would also exclude "mlp.gate_proj".

    Args:
        mode: Name of the format.
        layers: Names of the quantized layers.
        float_layers: Names of the layers in float.

    Raises:
        ValueError: The name of a float layer is part of the name of a quantized layer.
    """
    for name in layers:
        part = next((part for part in float_layers if part in name), None)
        if part:
            raise ValueError(
                f"custom_mode={mode!r} leaves out layers by parts of names, and {part}, in "
                f"float, is part of {name}: exclude both, or use custom_mode='quark'."
            )


def weight_spec(layer: QuantizedLayer) -> QuantizationSpec:
    """Return the specification of a layer's weight, which must be quantized."""
    assert layer.quant_config.weight is not None
    return layer.quant_config.weight


def weight_shape(layer: QuantizedLayer) -> tuple[int, int]:
    """Return (outputs, inputs) of a quantized linear layer."""
    outputs, inputs = layer.shape("weight")
    return outputs, inputs


def weight_group_size(spec: QuantizationSpec) -> int:
    """Return the number of inputs that share a scale, -1 for one scale per output channel."""
    return spec.scheme.group if spec.scheme.qscheme is QSchemeType.per_group else -1


def integer_weight_problem(spec: QuantizationSpec, bits: Collection[int]) -> str | None:
    """Return why a weight is not of integers per output channel or per group of inputs.

    Args:
        spec: Specification of the weight.
        bits: Supported widths.
    """
    scheme = spec.scheme
    grouped = scheme.qscheme is QSchemeType.per_group and scheme.axis in (-1, 1)
    channels = scheme.qscheme is QSchemeType.per_channel and scheme.axis in (-2, 0)
    if not scheme.has_zero_point or spec.fmt.bits not in bits or spec.second_stage is not None:
        return f"its weight is {spec.dtype.name}" + (" in two stages" * bool(spec.second_stage))
    if not (grouped or channels):
        return f"its weight has scales {scheme.qscheme.name}, ch_axis={scheme.axis}"
    if scheme.float_zero_point:
        return "its zero points are float32"
    return None


def weight_only_problem(name: str, config: QuantizationConfig) -> str | None:
    """Return why a weight-only format for layers of decoder blocks cannot hold a layer."""
    if config.input_tensors is not None:
        return "its input is quantized"
    return None if fnmatch.fnmatchcase(name, IN_BLOCKS) else "it is outside of the blocks"
