"""Base of the checkpoint formats of other tools, which hold linear layers only."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import with_all_weight_fields
from quark.torch.export.formats.kv_cache import (
    SCALE_NAMES,
    cache_scale_name,
    cache_state_name,
    is_static_fp8,
)
from quark.torch.export.formats.layer_checks import (
    common_problem,
    describe_problems,
    weight_group_size,
)
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.export import PACK_METHODS
from quark.torch.quantization.config.match import config_for, literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import GROUPS
from quark.torch.quantization.config.type import ScaleType

if TYPE_CHECKING:
    import torch

    from quark.torch.export.checkpoint.files import TensorHeader
    from quark.torch.export.checkpoint.headers import Entry
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


_SCALE_TYPES = {"float16": ScaleType.float16, "bfloat16": ScaleType.bfloat16}
_WEIGHT_GROUPS = f"weight_{GROUPS}"

K = TypeVar("K", bound=Hashable)
logger = logging.getLogger(__name__)


class ThirdPartyFormat(QuarkFormat):
    """A checkpoint format of another tool.

    Attributes:
        supported: Layers that it can hold, for error messages.
        tensor_names: Last part of a tensor's name in Quark's format -> in this format.
        code_names: Last parts of names that codes of weights may have.
        redundant_tensors: Last parts of names that are stored but not needed to load.
        supports_kv_cache: Whether it can hold scales of an fp8 key-value cache.
        supports_rotation: Whether it can hold rotations of inputs.
        supports_float_weights: Whether it can hold layers of which the output alone is quantized.
        supports_act_order: Whether it can hold groups of inputs in any order.
        float_layers: Names of layers in float.
        has_kv_cache: Whether the checkpoint has scales of a key-value cache.
        has_act_order: Whether the checkpoint stores the group of each input, because inputs are
            not in the order of their groups.
    """

    stores_rotated_keys = False
    stores_probabilities = False
    transformers_packages: ClassVar[Mapping[str, str] | None] = None
    supported: ClassVar[str]
    tensor_names: ClassVar[dict[str, str]] = {}
    code_names: ClassVar[tuple[str, ...]] = ()
    redundant_tensors: ClassVar[tuple[str, ...]] = ()
    supports_kv_cache: ClassVar[bool] = False
    supports_rotation: ClassVar[bool] = False
    supports_float_weights: ClassVar[bool] = False
    supports_act_order: ClassVar[bool] = False
    float_layers: Sequence[str] = ()
    has_kv_cache: bool = False
    has_act_order: bool = False

    def with_act_order(self, layout: TensorLayout) -> TensorLayout:
        """Return a layout that also stores the group of each input, if the checkpoint does."""
        from quark.torch.export.formats.layouts.act_order import ActOrderLayout

        return ActOrderLayout(layout) if self.has_act_order else layout

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and record which layers stay in float.

        Raises:
            ValueError: The format cannot hold a layer, or the options ask for values.
        """
        from quark.torch.export.formats.layouts.act_order import has_act_order

        if not self.supports_act_order:
            super().check_writable(layers, float_layers)
        if self.options.pack_method != PACK_METHODS[0]:
            raise ValueError(
                f"custom_mode={self.name!r} has its own order of codes: leave out pack_method."
            )
        if self.options.weight_format != "real_quantized":
            raise ValueError(
                f"custom_mode={self.name!r} stores codes: leave out "
                f"weight_format={self.options.weight_format!r}."
            )
        problems = {
            name: self._common_problem(name, layer) or self.layer_problem(name, layer)
            for name, layer in layers.items()
        }
        described = describe_problems(problems)
        if described:
            raise ValueError(
                f"custom_mode={self.name!r} cannot hold {described}. It holds {self.supported}. "
                "Exclude such layers, quantize them otherwise, or use custom_mode='quark'."
                f"{_kept_remedy(layers)}"
            )
        self.float_layers = float_layers
        self.has_act_order = any(map(has_act_order, layers.values()))
        self.has_kv_cache = any(
            layer.quant_config.output_tensors is not None for layer in layers.values()
        )

    def _common_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why no format of another tool can hold a layer, or None."""
        from torch import nn

        in_float = self.supports_float_weights and is_output_only(layer.quant_config)
        problem = common_problem(layer, (nn.Linear,), self.supports_rotation, in_float)
        output = layer.quant_config.output_tensors
        if problem is None and output is not None and not self.holds_output(name, layer):
            problem = "its output is quantized"
        return problem

    def holds_output(self, name: str, layer: QuantizedLayer) -> bool:
        """Whether the format can hold the quantized output of a layer."""
        output = layer.quant_config.output_tensors
        is_cache = self.supports_kv_cache and name.rpartition(".")[2] in SCALE_NAMES
        return is_cache and output is not None and self.holds_cache(output)

    def holds_cache(self, spec: QuantizationSpec) -> bool:
        """Whether the format can hold a key-value cache quantized by a specification."""
        return is_static_fp8(spec)

    @abstractmethod
    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a linear layer with a quantized weight, or None."""

    def common_scheme(self, schemes: Mapping[str, K]) -> K:
        """Return the scheme of all layers.

        Args:
            schemes: Scheme of each layer by name, in any form that can be compared.

        Raises:
            ValueError: Two layers differ.
        """
        first, scheme = next(iter(schemes.items()))
        for name, other in schemes.items():
            if other != scheme:
                raise ValueError(
                    f"custom_mode={self.name!r} has one scheme for all layers, but {first} is "
                    f"{scheme} and {name} is {other}. Exclude one of them, or use "
                    "custom_mode='quark' or 'compressed-tensors'."
                )
        return scheme

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer under the names of the checkpoint."""
        tensors = super().layer_tensors(layer, scales)
        return {self.tensor_names.get(name, name): tensor for name, tensor in tensors.items()}

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers stored in codes, with the type of scales that the checkpoint has.

        Layers in float whose outputs are quantized are among them, for a cache or for attention.

        Raises:
            ValueError: No layer is stored in codes, or ``g_idx`` contradicts ``group_size`` or is
                missing.
        """
        entries: dict[str, TensorHeader] = reader.entries
        coded = [name for name, layer in layers.items() if layer.weight is not None]
        in_float = [n for n in coded if _is_float_weight(entries.get(f"{n}.weight"))]
        if coded and len(in_float) == len(coded):
            raise ValueError(f"quant_method={self.name!r}, but every weight is stored in float.")
        if in_float:
            logger.warning(
                "%d layers stay in float, such as %s: the checkpoint has no codes for them.",
                len(in_float),
                in_float[0],
            )
        self.has_act_order = self._stores_act_order(layers, reader)
        dtypes = {
            type_name(entry.dtype)
            for key, entry in entries.items()
            if self.state_name(key).endswith(".weight_quantizer.scale")
        }
        scale_type = _SCALE_TYPES.get(dtypes.pop()) if len(dtypes) == 1 else None
        if scale_type is not None:
            self.config = with_all_weight_fields(self.config, scale_type=scale_type)
        exclude = [*self.config.exclude, *map(literal, in_float)]
        self.config = replace(self.config, exclude=exclude)
        stored = {n: config_for(n, None, self.config) for n in layers}
        layers = {n: layer for n, layer in stored.items() if layer is not None}
        self._check_groups(layers, entries)
        return layers

    def needs_groups(self, name: str) -> bool:
        """Whether the section says that the file has the group of each input of a layer."""
        return False

    def _check_groups(
        self, layers: Mapping[str, QuantizationConfig], entries: Mapping[str, TensorHeader]
    ) -> None:
        """Check that no layer lacks the group of each input.

        The layers that the section names need it. If it names none, all do as soon as one has it.

        Raises:
            ValueError: A layer lacks it.
        """
        stored = self.tensor_names.get(_WEIGHT_GROUPS)
        coded = [n for n in layers if any(f"{n}.{code}" in entries for code in self.code_names)]
        bare = {n for n in coded if f"{n}.{stored}" not in entries}
        named = [n for n in coded if self.needs_groups(n)]
        missing = [n for n in named or coded if n in bare]
        if missing and (named or len(bare) < len(coded)):
            raise ValueError(
                f"{missing[0]}.{stored} is missing, which gives the group of each input: "
                "quantization_config asks for it (act order), or other layers have it. Copy the "
                "whole checkpoint again."
            )

    def _stores_act_order(self, layers: Mapping[str, QuantizationConfig], reader: Any) -> bool:
        """Whether the inputs of a layer are not in the order of its groups."""
        from quark.torch.export.formats.layouts.act_order import is_in_order

        stored = self.tensor_names.get(_WEIGHT_GROUPS)
        keys = [key for key in reader.entries if key.rpartition(".")[2] == stored]
        weights = {
            key: layers[name].weight for key in keys if (name := key.rpartition(".")[0]) in layers
        }
        sizes = {key: weight_group_size(w) for key, w in weights.items() if w is not None}
        in_order = [is_in_order(reader.tensor(key), {sizes[key]}, key) for key in sizes]
        return not all(in_order)

    def stored_name(self, key: str) -> str:
        """Return the full name in the checkpoint; scales of a cache belong to the attention."""
        return cache_scale_name(key)

    def weight_count(self, spec: QuantizationSpec, codes: Entry, scale: Entry | None) -> int:
        """Return the number of weights, with codes that fill the last word of a row."""
        return ExportFormat.weight_count(self, spec, codes, scale)

    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``, "" if unused."""
        path, _, last = key.rpartition(".")
        in_order = last == self.tensor_names.get(_WEIGHT_GROUPS) and not self.has_act_order
        if last in self.redundant_tensors or in_order:
            return ""
        if self.supports_kv_cache and (name := cache_state_name(key)):
            return name
        quark_names = {stored: name for name, stored in self.tensor_names.items()}
        return super().state_name(f"{path}.{quark_names.get(last, last)}")


def _is_float_weight(entry: TensorHeader | None) -> bool:
    """Whether a tensor is stored in a float type wider than fp8 codes."""
    return entry is not None and entry.dtype.is_floating_point and entry.dtype.itemsize > 1


def is_output_only(config: QuantizationConfig) -> bool:
    """Whether the output of a layer is quantized, and nothing else."""
    return {name for name, _ in config.specs()} == {"output_tensors"}


def _kept_remedy(layers: Mapping[str, QuantizedLayer]) -> str:
    """Return what to do about layers that keep the codes of a quantized source, if there are any.

    Of the layers of a frozen model these alone are packed.
    """
    from quark.torch.quantization.nn.packed import PackedLayer

    if {isinstance(layer, PackedLayer) for layer in layers.values()} != {True, False}:
        return ""
    return (
        " Layers that keep the codes of the source stay in float if they are quantized with "
        "Config(keep_prequantized_layers=False)."
    )
