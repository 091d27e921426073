"""What is quantized how, and what it takes: from the headers of a checkpoint, or from tensors.

Nothing is loaded and no model is built: shapes, types and the configuration say it all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from quark.torch.numerics.scale_formats import E8M0, FLOAT32, ScaleFormat
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for, matches
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import QSchemeType

_GRANULARITY = {
    QSchemeType.per_tensor: "per tensor",
    QSchemeType.per_channel: "per channel",
    QSchemeType.per_group: "per group",
    QSchemeType.per_block: "per block",
}
_PARTS = (
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_scale_2",
    "weight_zero_point_2",
)
_MARKS = (
    "weight_scale",
    "input_scale",
    "output_scale",
    "bias_scale",
    "weight_scale_2",
    "input_scale_2",
)
_BESIDE = (*_MARKS, *(mark.replace("scale", "zero_point") for mark in _MARKS))


class Entry(Protocol):
    """A tensor, or what the header of a file says about it."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each axis."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""


@dataclass(frozen=True)
class Scheme:
    """How a layer is quantized, each tensor in words; "" for what is left alone."""

    weight: str = ""
    input: str = ""
    output: str = ""
    kv_cache: str = ""


@dataclass(frozen=True)
class LayerSummary:
    """A quantized layer.

    Attributes:
        name: Full name of the layer.
        scheme: How it is quantized.
        weights: Number of its quantized weights; 0 where only activations are quantized.
        bits: Stored bits of these weights: codes, scales and zero points.
    """

    name: str
    scheme: Scheme
    weights: int
    bits: int


@dataclass(frozen=True)
class TypeSummary:
    """Tensors of one type that are not quantized: how many, their elements and their bytes."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class SchemeSummary:
    """Layers of one scheme together, as in ``LayerSummary``."""

    scheme: Scheme
    layers: int
    weights: int
    bits: int

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits of a weight, None where no weight is quantized."""
        return self.bits / self.weights if self.weights else None


@dataclass(frozen=True)
class Summary:
    """A checkpoint or the tensors of one.

    Attributes:
        layers: The quantized layers in the order of their names.
        rest: What is not quantized, by type.
        bytes: Bytes of all tensors.
    """

    layers: tuple[LayerSummary, ...]
    rest: tuple[TypeSummary, ...]
    bytes: int

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        return sum(layer.weights for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Number of parameters, quantized or not; scales and zero points are none."""
        return self.weights + sum(kind.parameters for kind in self.rest)

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits of a quantized weight on average, None if there is none."""
        return sum(layer.bits for layer in self.layers) / self.weights if self.weights else None

    @property
    def bits_per_parameter(self) -> float | None:
        """Stored bits of a parameter on average over the whole model, None if it is empty."""
        return 8 * self.bytes / self.parameters if self.parameters else None

    def schemes(self) -> list[SchemeSummary]:
        """Return the layers by scheme, in the order in which schemes first appear."""
        groups: dict[Scheme, list[LayerSummary]] = {}
        for layer in self.layers:
            groups.setdefault(layer.scheme, []).append(layer)
        return [
            SchemeSummary(
                scheme, len(group), sum(x.weights for x in group), sum(x.bits for x in group)
            )
            for scheme, group in groups.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        schemes = [{**asdict(s), "bits_per_weight": s.bits_per_weight} for s in self.schemes()]
        return {
            "parameters": self.parameters,
            "quantized_weights": self.weights,
            "bytes": self.bytes,
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "schemes": schemes,
            "not_quantized": [asdict(kind) for kind in self.rest],
            "layers": [asdict(layer) for layer in self.layers],
        }


def describe(spec: QuantizationSpec | None, is_weight: bool = False) -> str:
    """Say in a few words how a tensor is quantized.

    Args:
        spec: Specification of the tensor, or None.
        is_weight: Whether it is a parameter, whose range is always settled beforehand.

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
    if scheme.qscheme is QSchemeType.per_group:
        words.append("row" if scheme.group == -1 else str(scheme.group))
    if spec.block_size is not None:
        words.append("x".join(str(side) for side in spec.block_size))
    if scheme.has_zero_point:
        words.append("sym" if scheme.symmetric else "asym")
    if not is_weight:
        words.append("dynamic" if spec.is_dynamic else "static")
    if spec.quantizes_codes:
        words.append(f"then {describe(spec.stages[1], is_weight)}")
    elif scheme.scale != FLOAT32 and not spec.fixes_blocks:
        words.append(f"({_scale_name(scheme.scale)} scales)")
    return " ".join(words)


def _scale_name(scale: ScaleFormat) -> str:
    if scale == E8M0:
        return "e8m0"
    if scale.power_of_two:
        return "power-of-two"
    return type_name(scale.dtype) if scale.fmt is None else scale.fmt.name


def describe_layer(layer: QuantizationConfig, is_cache: bool = False) -> Scheme:
    """Say in words how a layer is quantized.

    Args:
        layer: Configuration of the layer.
        is_cache: Whether its outputs make the key-value cache.
    """
    output = describe(layer.output_tensors)
    return Scheme(
        weight=describe(layer.weight, is_weight=True),
        input=describe(layer.input_tensors),
        output="" if is_cache else output,
        kv_cache=output if is_cache else "",
    )


def summarize(
    entries: Mapping[str, Entry], config: Config | None = None, model_dtype: str | None = None
) -> Summary:
    """Summarize the tensors of a checkpoint.

    Args:
        entries: Tensors or headers by the name a checkpoint stores them under.
        config: How the model is quantized, None if it is not.
        model_dtype: Type of the model, as ``config.json`` has it. A cast to that very type is no
            quantization; where the type is not known, a cast of any matrix counts.

    Returns:
        The summary. The number of weights is exact, except that 2-, 3- and 4-bit codes per tensor
        or per channel count what fills their last word.
    """
    layers = tuple(_layers(entries, config, model_dtype)) if config is not None else ()
    counted = {f"{x.name}.{part}" for x in layers if x.weights for part in _PARTS}
    counted |= {f"{x.name}.{part}" for x in layers for part in _BESIDE}
    rest = _by_type(entry for name, entry in entries.items() if name not in counted)
    return Summary(layers, rest, sum(_bits(entry) for entry in entries.values()) // 8)


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a type without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _layers(
    entries: Mapping[str, Entry], config: Config, model_dtype: str | None
) -> Iterator[LayerSummary]:
    cache = config.kv_cache_patterns
    stems = (name.removesuffix(".weight") for name in entries if name.endswith(".weight"))
    names = sorted(stems, key=_by_number)
    for name in names:
        layer = config_for(name, nn.Linear, config)
        if layer is None or not _is_layer(name, layer, entries, model_dtype):
            continue
        is_cache = layer.output_tensors is not None and matches(name, cache)
        weights = bits = 0
        if layer.weight is not None:
            weights = _count(name, layer.weight, entries)
            parts = (entries.get(f"{name}.{part}") for part in _PARTS)
            bits = sum(_bits(entry) for entry in parts if entry is not None)
        yield LayerSummary(name, describe_layer(layer, is_cache), weights, bits)


def _is_layer(
    name: str, layer: QuantizationConfig, entries: Mapping[str, Entry], model_dtype: str | None
) -> bool:
    """Whether what a configuration applies to is a quantized layer: norms have weights as well.

    What is quantized with a scale has it beside the weight. Casts and dynamic ranges leave no such
    mark; matrices of the right type are taken for layers then.
    """
    stored = entries[f"{name}.weight"]
    if layer.weight is not None and layer.weight.fmt.scaled:
        return f"{name}.weight_scale" in entries
    if any(f"{name}.{mark}" in entries for mark in _MARKS):
        return True
    if len(stored.shape) < 2:
        return False
    if layer.weight is None:
        return layer.output_tensors is not None
    kind = layer.weight.coded.fmt.storage_dtype
    return stored.dtype == kind and type_name(kind) != model_dtype


def _count(name: str, spec: QuantizationSpec, entries: Mapping[str, Entry]) -> int:
    """Number of weights whose codes are stored."""
    last = spec.stages[-1] if spec.quantizes_codes else spec
    stored, last = entries[f"{name}.weight"], last.for_parameter()
    fmt = last.fmt
    if fmt.word_codes == 1 or stored.dtype != fmt.storage_dtype:
        return math.prod(stored.shape)  # an element each: wide codes, values, or old 2-bit codes
    along = stored.shape[-1] * stored.dtype.itemsize * 8 // fmt.bits
    if last.qscheme is QSchemeType.per_group and last.scheme.has_zero_point:
        scales = entries[f"{name}.weight_scale"].shape
        if scales[0] != stored.shape[0]:  # stored (in, out), scales (groups, out)
            along = min(along, scales[-1])
        elif last.scheme.group > 0:
            along = min(along, scales[-1] * last.scheme.group)
    return math.prod(stored.shape[:-1]) * along


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _by_type(entries: Iterable[Entry]) -> tuple[TypeSummary, ...]:
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(type_name(entry.dtype), []).append(entry)
    return tuple(
        TypeSummary(
            kind,
            len(group),
            sum(math.prod(e.shape) for e in group),
            sum(_bits(e) for e in group) // 8,
        )
        for kind, group in sorted(kinds.items())
    )


def _bits(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize * 8
