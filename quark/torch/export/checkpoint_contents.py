"""Contents of a checkpoint: which layers are quantized how, and the bytes that they take.

Headers and the configuration suffice: no tensor is read, and no model is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quark.torch.export.checkpoint.headers import Entry
from quark.torch.export.checkpoint.model_names import renamed_layers
from quark.torch.export.formats.base import ExportFormat, get_format
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.description import (
    LayerDescription,
    describe_layer,
)
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import config_for, matches
from quark.torch.quantization.config.type import QSchemeType

# Beginnings of the names of what is stored for a layer, but not for its weight.
_NOT_OF_WEIGHT = ("bias", "input", "output", "k_scale", "v_scale")
# Names in the state of a layer of which one at least is there if the layer has static scales.
_SCALES = tuple(
    f"{tensor}{scale}"
    for tensor in ("weight", "input", "output", "bias")
    for scale in ("_quantizer.scale", "_scale_2")
)


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
    scheme: LayerDescription
    weights: int
    bits: int


@dataclass(frozen=True)
class TypeSummary:
    """Number, elements and bytes of the tensors of one type that are not quantized."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class SchemeSummary:
    """Totals of the layers of one scheme, as in ``LayerSummary``."""

    scheme: LayerDescription
    layers: int
    weights: int
    bits: int

    @property
    def bits_per_weight(self) -> float | None:
        """Stored bits of a weight, None if no weight is quantized."""
        return self.bits / self.weights if self.weights else None


@dataclass(frozen=True)
class Summary:
    """What the tensors of a checkpoint are.

    Attributes:
        layers: The quantized layers in the order of their names.
        rest: Tensors that are not quantized, by type.
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
        """Number of parameters, quantized or not; without scales and zero points."""
        return self.weights + sum(kind.parameters for kind in self.rest)

    @property
    def bits_per_weight(self) -> float | None:
        """Average stored bits of a quantized weight, None if there is none."""
        return sum(layer.bits for layer in self.layers) / self.weights if self.weights else None

    @property
    def bits_per_parameter(self) -> float | None:
        """Average stored bits of a parameter over the whole model, None if it is empty."""
        return 8 * self.bytes / self.parameters if self.parameters else None

    def schemes(self) -> list[SchemeSummary]:
        """Return the layers by scheme, in the order in which schemes first appear."""
        groups: dict[LayerDescription, list[LayerSummary]] = {}
        for layer in self.layers:
            groups.setdefault(layer.scheme, []).append(layer)
        return [
            SchemeSummary(
                scheme, len(group), sum(x.weights for x in group), sum(x.bits for x in group)
            )
            for scheme, group in groups.items()
        ]

    def scheme_words(self) -> str:
        """Return the schemes of the layers in words: ``weight int4 per group 128 sym; …``."""
        words = []
        for layers in self.schemes():
            scheme = layers.scheme
            tensors = {"weight": scheme.weight, "input": scheme.input, "cache": scheme.kv_cache}
            words.append(", ".join(f"{name} {how}" for name, how in tensors.items() if how))
        return "; ".join(dict.fromkeys(words))

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


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is.

    Attributes:
        model_type: Architecture, as the checkpoint names it.
        origin: How the checkpoint says it was quantized: quant_method, version and others; empty
            for a float model.
        note: Reason why layers are not told apart, "" if they are.
        summary: Its layers and tensors.
    """

    model_type: str
    origin: dict[str, Any]
    note: str
    summary: Summary


def summarize(
    entries: Mapping[str, Entry],
    source: ExportFormat | Config | None = None,
    model_dtype: str | None = None,
    described: Mapping[str, Any] | None = None,
) -> Summary:
    """Summarize the tensors of a checkpoint.

    Args:
        entries: Tensors or headers by the name that a checkpoint stores them under.
        source: Format of the checkpoint, or the configuration of one in the format of Quark; None
            for a float model.
        model_dtype: Type of the model, as ``config.json`` has it. A cast to that very type is not
            counted as quantization; where the type is not known, a cast of any matrix is.
        described: ``config.json``, which tells how the model names the layers; None if the tensors
            have the names of the model.

    Returns:
        The summary. The number of weights is exact, except that codes per tensor or per channel
        which fill the last word of a row are counted too.
    """
    fmt = _format(source)
    states: Mapping[str, Entry] = {}
    configs: dict[str, QuantizationConfig] = {}
    names: Mapping[str, str] = {}
    if fmt is not None:
        states = {fmt.state_name(key) or key: entry for key, entry in entries.items()}
        owners = [name.removesuffix(".weight") for name in states if name.endswith(".weight")]
        names = renamed_layers(described or {}, owners, fmt.config)
        configs = dict(_quantized_layers(states, names, fmt, model_dtype))
    sizes = weight_bytes(states, configs)
    layers = {}
    for name, config in configs.items():
        assert fmt is not None
        known, patterns = names.get(name, name), fmt.config.kv_cache_patterns
        is_cache = config.output_tensors is not None and matches(known, patterns)
        words, weights = describe_layer(config, is_cache), 0
        if config.weight is not None:
            codes, scale = states[f"{name}.weight"], states.get(f"{name}.weight_quantizer.scale")
            weights = fmt.weight_count(config.weight, codes, scale)
        layers[name] = LayerSummary(name, words, weights, 8 * sizes[name] if weights else 0)
    floats = [
        (type_name(entry.dtype), math.prod(entry.shape), entry.nbytes)
        for key, entry in entries.items()
        if not _is_counted(key if fmt is None else fmt.state_name(key) or key, layers)
    ]
    total = sum(entry.nbytes for entry in entries.values())
    return Summary(tuple(layers.values()), by_type(floats), total)


def _format(source: ExportFormat | Config | None) -> ExportFormat | None:
    if isinstance(source, Config):
        return get_format("quark", source, source.export or JsonExporterConfig())
    return source


def weight_bytes(entries: Mapping[str, Entry], layers: Collection[str]) -> dict[str, int]:
    """Return the bytes stored for the weight of each layer: codes, scales, zero points, indices.

    Args:
        entries: Tensors or headers by name, stored names or those of a model.
        layers: Names of quantized layers.
    """
    sizes = dict.fromkeys(layers, 0)
    for key, entry in entries.items():
        layer, part = _owner(key, sizes)
        if layer and not part.startswith(_NOT_OF_WEIGHT):
            sizes[layer] += entry.nbytes
    return sizes


def _owner(key: str, layers: Collection[str]) -> tuple[str, str]:
    """Return the layer that holds a tensor, "" if none does, and its name in the layer.

    Example: "mlp.up_proj.weight_quantizer.scale" is "weight_quantizer.scale" of "mlp.up_proj".
    """
    layer, _, part = key.rpartition(".")
    while layer and layer not in layers:
        layer, _, last = layer.rpartition(".")
        part = f"{last}.{part}"
    return layer, part


def _is_counted(key: str, layers: Mapping[str, LayerSummary]) -> bool:
    """Whether a tensor is counted with a quantized layer; a bias and a weight in float are not."""
    layer, part = _owner(key, layers)
    return bool(layer) and part != "bias" and (layers[layer].weights > 0 or part != "weight")


def _quantized_layers(
    states: Mapping[str, Entry],
    names: Mapping[str, str],
    fmt: ExportFormat,
    model_dtype: str | None,
) -> Iterator[tuple[str, QuantizationConfig]]:
    """Iterate over the quantized layers with their configurations, in the order of their names.

    Args:
        states: Headers by the names of layers in the files and of their state in the model.
        names: Names of layers in the files -> names that the configuration has, if they differ.
        fmt: Format of the checkpoint.
        model_dtype: Type of the model, None if it is not known.
    """
    weights = (name.removesuffix(".weight") for name in states if name.endswith(".weight"))
    for name in sorted(weights, key=_by_number):
        layer = _config_of(name, names.get(name, name), states, fmt)
        if layer is not None and _is_quantized(name, layer, states, model_dtype):
            yield name, layer


def _config_of(
    name: str, known: str, states: Mapping[str, Entry], fmt: ExportFormat
) -> QuantizationConfig | None:
    """Return the configuration of a layer, which it calls ``known``; None if it stays in float.

    Headers do not tell the types of layers. Where a configuration selects by type, the first
    choice that fits the stored codes counts, a linear layer before all. Choices that are stored
    alike, such as int4 and uint4 in the same groups, are not told apart.
    """
    usual = config_for(known, None, fmt.config)
    for kind in fmt.config.layer_type_quant_config:
        if _fits(name, usual, states, fmt):
            break
        other = config_for(known, kind, fmt.config)
        usual = other if _fits(name, other, states, fmt) else usual
    return usual


def _fits(
    name: str,
    layer: QuantizationConfig | None,
    states: Mapping[str, Entry],
    fmt: ExportFormat,
) -> bool:
    """Whether codes, scales and zero points of a layer are stored as a configuration says."""
    codes, scale = states[f"{name}.weight"], states.get(f"{name}.weight_quantizer.scale")
    if layer is None or layer.weight is None:
        return scale is None
    last = layer.weight.coded.for_parameter()
    if scale is None or not last.fmt.scaled:
        return scale is None and not last.fmt.scaled
    has_zeros = f"{name}.weight_quantizer.zero_point" in states
    if type_name(codes.dtype) != last.fmt.storage_type or has_zeros != last.scheme.has_zero_point:
        return False
    scales = math.prod(scale.shape)
    if last.qscheme is QSchemeType.per_group:
        return scales * last.scheme.group == fmt.weight_count(layer.weight, codes, scale)
    return (scales == 1) is (last.qscheme is QSchemeType.per_tensor)


def _is_quantized(
    name: str, layer: QuantizationConfig, states: Mapping[str, Entry], model_dtype: str | None
) -> bool:
    """Whether a module with a weight, which a configuration matches, is a quantized layer.

    Norms have weights too, and may match. A layer that is quantized with static scales has them in
    the checkpoint. Casts and dynamic scales leave no trace: a matrix of the right type is taken for
    a quantized layer then.
    """
    stored = states[f"{name}.weight"]
    if layer.weight is not None and layer.weight.fmt.scaled:
        return f"{name}.weight_quantizer.scale" in states
    if any(f"{name}.{scale}" in states for scale in _SCALES):
        return True
    if len(stored.shape) < 2:
        return False
    if layer.weight is None:
        return layer.output_tensors is not None
    kind = layer.weight.coded.fmt.storage_type
    return type_name(stored.dtype) == kind and kind != model_dtype


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def by_type(tensors: Iterable[tuple[str, int, int]]) -> tuple[TypeSummary, ...]:
    """Return totals by type, given the type, elements and bytes of each tensor."""
    groups: dict[str, list[tuple[int, int]]] = {}
    for kind, count, size in tensors:
        groups.setdefault(kind, []).append((count, size))
    return tuple(
        TypeSummary(kind, len(group), sum(n for n, _ in group), sum(size for _, size in group))
        for kind, group in sorted(groups.items())
    )
