"""Checkpoints in the layouts of other tools: linear layers alone, their tensors by other names."""

from __future__ import annotations

import fnmatch
import logging
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from quark.torch.export.checkpoint.files import Stored
from quark.torch.export.formats.config_section import IN_BLOCKS
from quark.torch.export.formats.layouts.act_order import (
    GROUPS,
    OrderedLayout,
    has_order,
    is_in_order,
)
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for, literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, ScaleType
from quark.torch.quantization.nn.layer import QuantMixin
from quark.torch.quantization.nn.packed import Layout, PackedMixin
from quark.torch.quantization.nn.quantizer import State

CACHE = {"k_proj": "k_scale", "v_proj": "v_scale"}
SCALES = {torch.float16: ScaleType.float16, torch.bfloat16: ScaleType.bfloat16}
FP8 = QuantizationSpec(Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, is_dynamic=False)

_GROUPS = f"weight_{GROUPS}"

K = TypeVar("K", bound=Hashable)
logger = logging.getLogger(__name__)


class ForeignFormat(QuarkFormat):
    """A checkpoint of another tool.

    Attributes:
        holds: What it can hold, for messages.
        renamed: Last part of a name here -> in the checkpoint.
        unneeded: Last parts of names in the checkpoint that tell nothing new.
        has_cache: Whether it can hold scales of an fp8 key-value cache.
        holds_order: Whether it can hold groups of inputs in any order.
        left: Names of layers in float.
        cache: Whether there are scales of a cache.
        ordered: Whether the group of each input is stored because these are in another order.
    """

    holds: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}
    unneeded: ClassVar[tuple[str, ...]] = ()
    has_cache: ClassVar[bool] = False
    holds_order: ClassVar[bool] = False
    left: Sequence[str] = ()
    cache: bool = False
    ordered: bool = False

    def in_any_order(self, layout: Layout) -> Layout:
        """Return a layout that also holds groups of inputs in any order, where there are such."""
        return OrderedLayout(layout) if self.ordered else layout

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check each layer by itself and remember what stays in float."""
        if not self.holds_order:
            super().admit(layers, left)
        if self.options.weight_format != "real_quantized":
            raise ValueError(
                f"custom_mode={self.name!r} stores codes: leave out "
                f"weight_format={self.options.weight_format!r}."
            )
        problems = {
            name: self._common_problem(name, layer) or self.problem(name, layer)
            for name, layer in layers.items()
        }
        said = refusals(problems)
        if said:
            raise ValueError(
                f"custom_mode={self.name!r} cannot hold {said}. It holds {self.holds}. Exclude "
                "such layers, quantize them otherwise, or use custom_mode='quark'."
            )
        self.left = left
        self.ordered = any(map(has_order, layers.values()))
        self.cache = any(layer.quant_config.output_tensors is not None for layer in layers.values())

    def _common_problem(self, name: str, layer: QuantMixin | PackedMixin) -> str | None:
        config, last = layer.quant_config, name.rpartition(".")[2]
        output = config.output_tensors
        if layer.float_class is not nn.Linear:
            return f"it is a {layer.float_class.__name__}, not a Linear"
        if layer.input_rotation is not None:
            return "its input is rotated"
        if config.weight is None:
            return "its weight is not quantized"
        if config.bias is not None:
            return "its bias is quantized"
        if output is not None and not (self.has_cache and last in CACHE and is_static_fp8(output)):
            return "its output is quantized"
        return None

    @abstractmethod
    def problem(self, name: str, layer: Any) -> str | None:
        """Return why a linear layer with a quantized weight cannot be held, or None."""

    def one_of_all(self, kinds: Mapping[str, K]) -> K:
        """Return what all layers have in common.

        Raises:
            ValueError: They differ.
        """
        first, kind = next(iter(kinds.items()))
        for name, other in kinds.items():
            if other != kind:
                raise ValueError(
                    f"custom_mode={self.name!r} has one scheme for all layers, but {first} is "
                    f"{kind} and {name} is {other}. Exclude one of them, or use "
                    "custom_mode='quark' or 'compressed-tensors'."
                )
        return kind

    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer under the names of the checkpoint."""
        found = super().tensors(layer, scales)
        return {self.renamed.get(name, name): tensor for name, tensor in found.items()}

    def found(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers whose codes are stored, and take the type of their scales as it is.

        Raises:
            ValueError: No layer has codes, or groups of inputs are of other sizes than is said.
        """
        entries: dict[str, Stored] = reader.entries
        plain = [n for n in layers if _is_wide(entries.get(f"{n}.weight"))]
        if len(plain) == len(layers):
            raise ValueError(f"quant_method={self.name!r}, but every weight is stored in float.")
        if plain:
            logger.warning(
                "%d layers stay in float, such as %s: the checkpoint has no codes for them.",
                len(plain),
                plain[0],
            )
        self.ordered = self._finds_order(reader)
        kinds = {
            entry.dtype
            for key, entry in entries.items()
            if self.state_name(key).endswith(".weight_quantizer.scale")
        }
        held = SCALES.get(kinds.pop()) if len(kinds) == 1 else None
        config = self.config if held is None else with_weights(self.config, scale_type=held)
        self.config = replace(config, exclude=[*config.exclude, *map(literal, plain)])
        kept = {n: config_for(n, nn.Linear, self.config) for n in layers if n not in plain}
        return {n: layer for n, layer in kept.items() if layer is not None}

    def _finds_order(self, reader: Any) -> bool:
        """Whether the groups of a layer are in another order than its inputs."""
        stored = self.renamed.get(_GROUPS)
        keys = [key for key in reader.entries if key.rpartition(".")[2] == stored]
        configs = (self.config.global_quant_config, *self.config.layer_quant_config.values())
        sizes = {group_of(c.weight) for c in configs if c.weight is not None}
        in_order = [is_in_order(reader.tensor(key), sizes, key) for key in keys]
        return not all(in_order)

    def stored_name(self, key: str) -> str:
        """Return ``….k_scale`` for ``….k_proj.output_scale``, other names as they are."""
        head, _, last = key.rpartition(".")
        parent, _, layer = head.rpartition(".")
        return f"{parent}.{CACHE[layer]}" if last == "output_scale" and layer in CACHE else key

    def state_name(self, key: str) -> str:
        """Return the name in the state of the model."""
        head, _, last = key.rpartition(".")
        if last in self.unneeded or (last == self.renamed.get(_GROUPS) and not self.ordered):
            return ""
        layers = {scale: layer for layer, scale in CACHE.items()}
        if self.has_cache and last in layers:
            return f"{head}.{layers[last]}.output_quantizer.scale"
        own = {stored: name for name, stored in self.renamed.items()}
        return super().state_name(f"{head}.{own.get(last, last)}")


def _is_wide(entry: Stored | None) -> bool:
    """Whether a tensor is stored, and as floats wider than codes."""
    return entry is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 1


def with_weight(layer: QuantizationConfig, **fields: Any) -> QuantizationConfig:
    """Return a layer whose weight, if it is quantized, has other fields."""
    return layer if layer.weight is None else replace(layer, weight=replace(layer.weight, **fields))


def with_weights(config: Config, **fields: Any) -> Config:
    """Return a configuration whose weights have other fields."""
    layers = {n: with_weight(layer, **fields) for n, layer in config.layer_quant_config.items()}
    whole = with_weight(config.global_quant_config, **fields)
    return replace(config, global_quant_config=whole, layer_quant_config=layers)


def refusals(problems: Mapping[str, str | None]) -> str:
    """Say which layers cannot be held and why, those alike together; "" if all can."""
    alike: dict[str, list[str]] = {}
    for name, problem in problems.items():
        if problem:
            alike.setdefault(problem, []).append(name)
    return "; ".join(
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {problem}"
        for problem, names in alike.items()
    )


def is_static_fp8(spec: QuantizationSpec) -> bool:
    """Whether a tensor has one settled scale and codes of fp8_e4m3."""
    one = spec.dtype is Dtype.fp8_e4m3 and spec.scheme.qscheme is QSchemeType.per_tensor
    return one and not spec.is_dynamic and spec.second_stage is None


def shape_of(layer: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a quantized linear layer."""
    shape = layer.shapes["weight"] if isinstance(layer, PackedMixin) else layer.weight.shape
    return int(shape[0]), int(shape[1])


def integer_problem(spec: QuantizationSpec, bits: Sequence[int]) -> str | None:
    """Return why a weight is not one of integers with groups along the inputs, or None."""
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


def group_of(spec: QuantizationSpec) -> int:
    """Inputs that share a scale, -1 for all of them."""
    return spec.scheme.group if spec.scheme.qscheme is QSchemeType.per_group else -1


def unsigned(state: State) -> State:
    """Return the same tensor in codes without sign: 2^(bits-1) more, zero points as well.

    Raises:
        ValueError: The scheme is symmetric, but its zero point is not the middle code.
    """
    fmt = state.scheme.fmt
    middle = 1 << (fmt.bits - 1)
    offset = middle if fmt.signed else 0
    assert state.codes is not None and state.scale is not None
    zeros = state.zero_point
    zeros = torch.zeros_like(state.scale, dtype=torch.int32) if zeros is None else zeros.int()
    zeros = zeros + offset
    if state.scheme.symmetric and (zeros != middle).any():
        raise ValueError(
            f"A symmetric {fmt.name} weight has zero points other than the middle code, as "
            "versions before 1.0 wrote them: only custom_mode='quark' can hold it."
        )
    codes = (state.codes.to(torch.int16) + offset).to(torch.uint8)
    spec = replace(state.spec, dtype=Dtype[fmt.name if not fmt.signed else f"u{fmt.name}"])
    return State(spec.for_parameter(), codes, state.scale, zeros.to(torch.uint8))


def to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes along the last axis as bits in a row, the first in the lowest, in words.

    Args:
        codes: (…, n) uint8.
        bits: Width of a code.

    Returns:
        (…, ceil(n * bits / 32)) int32.
    """
    stored = codes if bits == 8 else pack(codes, _bytes(bits))
    stored = nn.functional.pad(stored, (0, -stored.shape[-1] % 4))
    words = stored.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return words[..., : -(-codes.shape[-1] * bits // 32)]


def from_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first ``count`` codes along the last axis: the inverse of ``to_words``."""
    stored = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return stored[..., :count]
    stored = nn.functional.pad(stored, (0, -stored.shape[-1] % bits))
    return unpack(stored, _bytes(bits), count)


def _bytes(bits: int) -> Any:
    """Return the format of eight codes in as many bytes as a code has bits."""
    return replace(
        Dtype[f"uint{bits}"].value, word_codes=8, word_dtype=torch.uint8, first_high=False
    )


def weight_only_problem(name: str, config: QuantizationConfig) -> str | None:
    """Return why a format of weights within blocks alone cannot hold a layer, or None."""
    if config.input_tensors is not None:
        return "its input is quantized"
    return None if fnmatch.fnmatchcase(name, IN_BLOCKS) else "it is outside of the blocks"
