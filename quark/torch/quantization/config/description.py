"""Descriptions of configurations in a few words, for tables and reports."""

from __future__ import annotations

from dataclasses import dataclass

from quark.torch.numerics.scale_formats import E8M0, FLOAT32, ScaleFormat
from quark.torch.quantization.config.layer import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import QSchemeType

_GRANULARITY = {
    QSchemeType.per_tensor: "per tensor",
    QSchemeType.per_channel: "per channel",
    QSchemeType.per_group: "per group",
    QSchemeType.per_block: "per block",
    QSchemeType.per_head: "per head",
}


@dataclass(frozen=True)
class LayerDescription:
    """How each tensor of a layer is quantized, in words; "" for a tensor that is not."""

    weight: str = ""
    input: str = ""
    output: str = ""
    kv_cache: str = ""


def describe(spec: QuantizationSpec | None, is_weight: bool = False) -> str:
    """Describe in a few words how a tensor is quantized.

    Args:
        spec: Specification of the tensor, or None.
        is_weight: Whether it is a parameter, whose range is never computed anew.

    Returns:
        Such as ``uint4 per group 32 asym`` or ``int8 per token sym dynamic``; "" for None.
    """
    if spec is None:
        return ""
    spec = spec.for_parameter() if is_weight else spec
    scheme = spec.scheme
    name = spec.dtype.name if spec.mx_element_dtype is None else f"mx{spec.mx_element_dtype.name}"
    if not spec.fmt.scaled:
        return name
    words = [name, "per token" if scheme.per_token else _GRANULARITY[scheme.qscheme]]
    if spec.qscheme is QSchemeType.per_head:
        words[1:] = ["per token and head" if spec.is_dynamic else "per head"]
    elif scheme.qscheme is QSchemeType.per_group:
        words.append("row" if scheme.group == -1 else str(scheme.group))
    if spec.block_size is not None:
        words.append("x".join(str(side) for side in spec.block_size))
    if scheme.has_zero_point:
        words.append("sym" if scheme.symmetric else "asym")
    if not is_weight:
        words.append("dynamic" if spec.is_dynamic else "static")
    if spec.quantizes_codes:
        words.append(f"then {describe(spec.stages[1], is_weight)}")
        return " ".join(words)
    scales = ["signed"] if scheme.signed_scales else ["4/6"] if scheme.four_over_six else []
    if scheme.scale != FLOAT32 and not spec.fixes_blocks:
        scales.append(_scale_name(scheme.scale))
    if scales:
        words.append(f"({' '.join(scales)} scales)")
    return " ".join(words)


def describe_layer(layer: QuantizationConfig, is_cache: bool = False) -> LayerDescription:
    """Describe how the tensors of a layer are quantized.

    Args:
        layer: Configuration of the layer.
        is_cache: Whether its outputs make up the key-value cache.
    """
    output = describe(layer.output_tensors)
    return LayerDescription(
        weight=describe(layer.weight, is_weight=True),
        input=describe(layer.input_tensors),
        output="" if is_cache else output,
        kv_cache=output if is_cache else "",
    )


def _scale_name(scale: ScaleFormat) -> str:
    if scale == E8M0:
        return "e8m0"
    if scale.power_of_two:
        return "power-of-two"
    return scale.dtype if scale.fmt is None else scale.fmt.name
