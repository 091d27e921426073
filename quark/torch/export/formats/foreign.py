"""Checkpoints in the layouts of other tools: linear layers alone, their tensors by other names."""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.numerics.blocks import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.mixin import QuantMixin
from quark.torch.quantization.nn.packed import PackedMixin
from quark.torch.quantization.nn.quantizer import State

IN_BLOCKS = "*.[0-9]*.*"  # names of layers inside of numbered blocks
CACHE = {"k_proj": "k_scale", "v_proj": "v_scale"}
FP8 = QuantizationSpec(Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, is_dynamic=False)

K = TypeVar("K", bound=Hashable)


class ForeignFormat(QuarkFormat):
    """A checkpoint of another tool.

    Attributes:
        holds: What it can hold, for messages.
        renamed: Last part of a name here -> in the checkpoint.
        unneeded: Last parts of names in the checkpoint that tell nothing new.
        has_cache: Whether it can hold scales of an fp8 key-value cache.
        left: Names of layers in float.
        cache: Whether there are scales of a cache.
    """

    holds: ClassVar[str]
    renamed: ClassVar[dict[str, str]] = {}
    unneeded: ClassVar[tuple[str, ...]] = ()
    has_cache: ClassVar[bool] = False
    left: Sequence[str] = ()
    cache: bool = False

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check each layer by itself and remember what stays in float."""
        if self.options.weight_format != "real_quantized":
            raise ValueError(
                f"custom_mode={self.name!r} stores codes: leave out "
                f"weight_format={self.options.weight_format!r}."
            )
        for name, layer in layers.items():
            assert isinstance(layer, (QuantMixin, PackedMixin))
            problem = self._common_problem(name, layer) or self.problem(name, layer)
            if problem:
                raise ValueError(
                    f"custom_mode={self.name!r} cannot hold {name}: {problem}. It holds "
                    f"{self.holds}. Exclude the layer, quantize it otherwise, or use "
                    "custom_mode='quark'."
                )
        self.left = left
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

    def stored_name(self, key: str) -> str:
        """Return ``….k_scale`` for ``….k_proj.output_scale``, other names as they are."""
        head, _, last = key.rpartition(".")
        parent, _, layer = head.rpartition(".")
        return f"{parent}.{CACHE[layer]}" if last == "output_scale" and layer in CACHE else key

    def state_name(self, key: str) -> str:
        """Return the name in the state of the model."""
        head, _, last = key.rpartition(".")
        if last in self.unneeded:
            return ""
        layers = {scale: layer for layer, scale in CACHE.items()}
        if self.has_cache and last in layers:
            return f"{head}.{layers[last]}.output_quantizer.scale"
        own = {stored: name for name, stored in self.renamed.items()}
        return super().state_name(f"{head}.{own.get(last, last)}")


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


def unsigned_spec(bits: int, group: int, symmetric: bool, **fields: Any) -> QuantizationSpec:
    """Return the specification of a weight of unsigned integers per group of inputs."""
    return QuantizationSpec(
        Dtype[f"uint{bits}"],
        qscheme=QSchemeType.per_group,
        ch_axis=-1,
        group_size=group,
        symmetric=symmetric,
        is_dynamic=False,
        **fields,
    )


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


def named_config(layer: QuantizationConfig, left: Sequence[str] | None) -> Config:
    """Return the configuration of all layers but those whose names contain one of ``left``.

    Without names to leave out it is that of the layers inside of numbered blocks.
    """
    if left is None:
        return Config(QuantizationConfig(), layer_quant_config={IN_BLOCKS: layer})
    return Config(layer, exclude=[f"*{literal(name)}*" for name in left])


def required(section: Mapping[str, Any], key: str, known: Sequence[Any], default: Any) -> Any:
    """Return the value of a key of a ``quantization_config``.

    Raises:
        ValueError: It is not one of ``known``.
    """
    value = section.get(key, default)
    if value not in known:
        raise ValueError(
            f"quant_method={section.get('quant_method')!r}: {key}={value!r} is not read here "
            f"(known: {', '.join(map(repr, known))})."
        )
    return value


def weight_only_problem(name: str, config: QuantizationConfig) -> str | None:
    """Return why a format of weights within blocks alone cannot hold a layer, or None."""
    if config.input_tensors is not None:
        return "its input is quantized"
    return None if fnmatch.fnmatchcase(name, IN_BLOCKS) else "it is outside of the blocks"
