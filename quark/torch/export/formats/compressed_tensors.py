"""The format of compressed-tensors: ``quant_method`` "compressed-tensors".

Each group of layers has a format. ``pack-quantized``: ``weight_packed`` int32, ``weight_scale``,
``weight_zero_point`` and ``weight_shape``. ``int-quantized``, ``float-quantized`` and
``mxfp8-quantized``: ``weight`` int8 or float8. ``mxfp4-pack-quantized``, ``mxfp6-pack-quantized``
and ``nvfp4-pack-quantized``: ``weight_packed`` uint8. The tensor scale of NVFP4 is stored as its
reciprocal, ``weight_global_scale``. Rotations of inputs are ``transform_config`` (``transforms``).
Queries, keys and values are a group without weights (``compressed_tensors_attention``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.compressed_tensors_args import (
    INT,
    PACKED,
    args_to_spec,
    cache_args,
    check_group,
    format_name,
    layer_scheme,
    stored_format,
)
from quark.torch.export.formats.compressed_tensors_attention import (
    attention_groups,
    holds_queries,
    queries_state_name,
    queries_stored_name,
    read_attention,
    without_ignored,
)
from quark.torch.export.formats.compressed_tensors_targets import targets_of
from quark.torch.export.formats.config_section import read_names, to_pattern
from quark.torch.export.formats.kv_cache import is_static_fp8
from quark.torch.export.formats.layer_checks import weight_shape, weight_spec
from quark.torch.export.formats.third_party import ThirdPartyFormat, is_output_only
from quark.torch.export.formats.transforms import ROTATION, InputTransform, read_transforms
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.headers import Entry
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


logger = logging.getLogger(__name__)

MIXED = "mixed-precision"  # format of a checkpoint whose groups differ
_LINEAR = "Linear"  # the target of a group that holds all layers that no other group does
DENSE = "dense"  # format of a checkpoint with all weights in float


class CompressedTensorsFormat(ThirdPartyFormat):
    """Integer, fp8, MX and NVFP4 checkpoints for vLLM and Transformers."""

    name = "compressed-tensors"
    transformers_packages: ClassVar = {"compressed_tensors": "compressed-tensors"}
    supported = (
        "Linear layers with integer weights of 2 to 8 bits per channel or per group of inputs "
        "(inputs in float, signed integers, or, below 8 bits, fp8_e4m3), fp8_e4m3 weights (inputs "
        "in float or fp8_e4m3), MXFP4, MXFP6 (E2M3), MXFP8 (E4M3) and NVFP4"
    )
    tensor_names: ClassVar = {
        "weight_scale_2": "weight_global_scale",
        "input_scale_2": "input_global_scale",
        "weight_groups": "weight_g_idx",
    }
    code_names = ("weight", "weight_packed")
    redundant_tensors = ("weight_shape",)
    supports_kv_cache = True
    supports_rotation = True
    supports_float_weights = True
    is_read = False  # whether the section is that of a checkpoint
    transforms: Sequence[InputTransform] = ()
    quantized: Collection[str] = ()
    act_order: Mapping[str, bool] = MappingProxyType({})

    @classmethod
    def from_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format that reads a checkpoint with this section.

        Raises:
            ValueError: The section has a key or a value that is not supported.
        """
        fmt = super().from_section(section)
        assert isinstance(fmt, cls)
        fmt.transforms = read_transforms(section)
        fmt.act_order = _read_act_order(section)
        fmt.is_read = True
        return fmt

    def layout_of(self, config: QuantizationConfig) -> TensorLayout:
        """Return the layout of the tensors of a layer with this configuration."""
        from quark.torch.export.formats.layouts.compressed_tensors import CompressedTensorsLayout

        weight = config.weight if self.is_read else None
        fmt = format_name(config) if weight is None else stored_format(weight)
        return self.with_act_order(CompressedTensorsLayout(fmt != INT))

    def check_model(self, model: nn.Module) -> None:
        """Remember the classes of the modules: groups of attention name them."""
        self.classes = {name: type(module).__name__ for name, module in model.named_modules()}

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and collect the layers of each scheme in a group.

        Raises:
            ValueError: The format cannot hold a layer.
        """
        from quark.torch.export.formats.transform_tensors import TransformWriter

        super().check_writable(layers, float_layers)
        self._check_cache(layers)
        in_float = [name for name, layer in layers.items() if is_output_only(layer.quant_config)]
        self.float_layers = [*float_layers, *in_float]
        self.attention = attention_groups(self.name, layers, self.config, self.classes)
        self.rotations = TransformWriter()
        self.groups: list[tuple[dict[str, Any], list[str]]] = []  # scheme, names of layers
        for name, layer in layers.items():
            if is_output_only(layer.quant_config):
                continue
            scheme = layer_scheme(layer.quant_config)
            names = next((n for known, n in self.groups if known == scheme), None)
            if names is None:
                self.groups.append((scheme, [name]))
            else:
                names.append(name)

    def holds_cache(self, spec: QuantizationSpec) -> bool:
        """Whether the format can hold a key-value cache quantized by a specification."""
        return cache_args(spec) is not None

    def holds_output(self, name: str, layer: QuantizedLayer) -> bool:
        """Whether the format can hold the quantized output of a layer: of a cache, or queries."""
        is_query = holds_queries(name, layer.quant_config, self.config)
        return is_query or super().holds_output(name, layer)

    def _check_cache(self, layers: Mapping[str, QuantizedLayer]) -> None:
        """Record how the cache is quantized.

        Raises:
            ValueError: Two layers differ, or keys other than fp8 with one scale are quantized
                before rotary embedding.
        """
        outputs = {
            name: layer.quant_config.output_tensors
            for name, layer in layers.items()
            if not holds_queries(name, layer.quant_config, self.config)
        }
        caches = {n: cache_args(spec) for n, spec in outputs.items() if spec is not None}
        self.cache = next(iter(caches.values()), None)
        for name, args in caches.items():
            if args != self.cache:
                raise ValueError(
                    f"custom_mode={self.name!r} has one scheme for all keys and values, but {name} "
                    f"has {args} and {next(iter(caches))} {self.cache}. Quantize them alike."
                )
        is_late = any(spec is not None and not is_static_fp8(spec) for spec in outputs.values())
        if is_late and not self.config.kv_cache_post_rope:
            raise ValueError(
                f"custom_mode={self.name!r} has caches, other than fp8 with one scale, for keys "
                "after rotary embedding: quantize with kv_cache_post_rope=True, or use "
                "custom_mode='quark'."
            )
        if caches and not self.config.kv_cache_post_rope:
            logger.warning(
                "The scales of the cache are those of keys before rotary embedding, and readers of "
                "%s quantize keys after it: quantize with kv_cache_post_rope=True.",
                self.name,
            )

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        config = layer.quant_config
        fmt = format_name(config)
        if is_output_only(config):
            return None
        if fmt is None:
            specs = {"weight": config.weight, "input": config.input_tensors}
            return " and ".join(
                f"its {tensor} is {spec.dtype.name} {spec.scheme.qscheme.name}"
                for tensor, spec in specs.items()
                if spec is not None
            )
        group = weight_spec(layer).scheme.group
        if fmt == PACKED and group > 0 and weight_shape(layer)[1] % group:
            return f"its {weight_shape(layer)[1]} inputs are no multiple of {group}"
        return None

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, with ``weight_shape`` for weights in dense words."""
        import torch

        tensors = super().layer_tensors(layer, scales)
        for name, tensor in tensors.items():
            if name.endswith("_global_scale"):
                tensors[name] = tensor.reciprocal()
        rotation = tensors.pop(ROTATION, None)
        if rotation is not None:
            tensors |= [self.rotations.add(rotation)]
        fmt = format_name(layer.quant_config)
        if fmt is not None and "pack" in fmt:
            tensors["weight_packed"] = tensors.pop("weight")
        if fmt == PACKED:
            tensors["weight_shape"] = torch.tensor(weight_shape(layer), device="cpu")
        return tensors

    def stored_name(self, key: str) -> str:
        """Return the full name in the checkpoint; the layers of rotations are recorded."""
        self.rotations.name(key)
        return super().stored_name(queries_stored_name(key))

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers stored in codes.

        Raises:
            ValueError: No layer is stored in codes, the groups of inputs are not sound, a stored
                shape is not that of its weight, or attention is not that of the model.
        """
        stored = without_ignored(super().stored_layers(layers, reader), self.config)
        _check_shapes(reader)
        self.quantized = stored
        return stored

    def needs_groups(self, name: str) -> bool:
        """Whether the group of a layer says that the file has the group of each input."""
        return next((moves for p, moves in self.act_order.items() if fnmatchcase(name, p)), False)

    def layer_reader(self, reader: Any, model: nn.Module) -> Any:
        """Return a reader with the rotations of inputs as layers have them.

        Raises:
            ValueError: A rotation is missing, does not fit, or belongs to a layer in float.
        """
        if not self.transforms:
            return reader
        from quark.torch.export.formats.transform_tensors import TransformReader

        made = TransformReader(reader, model, self.transforms, self.quantized)
        self.config = replace(self.config, algo_config=list(made.algorithms))
        return made

    def weight_count(self, spec: QuantizationSpec, codes: Entry, scale: Entry | None) -> int:
        """Return the number of weights; see ``ExportFormat.weight_count``."""
        is_byte_each = spec.scheme.has_zero_point and type_name(codes.dtype) == "int8"
        return prod(codes.shape) if is_byte_each else super().weight_count(spec, codes, scale)

    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``."""
        return super().state_name(queries_state_name(re.sub(r"\.weight_packed$", ".weight", key)))

    def convert_loaded(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return tensor scales instead of their stored reciprocals."""
        return tensor.reciprocal() if key.endswith("_global_scale") else tensor

    def config_section(self) -> dict[str, Any]:
        """Return the section that compressed-tensors reads."""
        formats = {scheme["format"] for scheme, _ in self.groups} or {DENSE}
        members = [names for _, names in self.groups]
        targets = [[_LINEAR]] if len(members) == 1 else targets_of(members)
        groups = {
            f"group_{i}": {**scheme, "targets": targets[i]}
            for i, (scheme, _) in enumerate(self.groups)
        }
        for group in self.attention:
            groups[f"group_{len(groups)}"] = group
        return {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "ignore": list(self.float_layers),
            "kv_cache_scheme": self.cache,
            "quant_method": self.name,
            "quantization_status": "compressed",
            **self.rotations.section(),
        }

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return the configuration that the groups describe.

        Raises:
            ValueError: A group is malformed or not supported.
        """
        _check_dense(section)
        default = QuantizationConfig()
        layers: dict[str, QuantizationConfig] = {}
        groups = _read_groups(section)
        of_attention = [group for group in groups if group.get("weights") is None]
        for group in groups:
            if group in of_attention:
                continue
            fmt = group.get("format") or section.get("format")
            layer = QuantizationConfig(
                weight=args_to_spec(group.get("weights"), is_input=False, fmt=fmt),
                input_tensors=args_to_spec(group.get("input_activations"), True, fmt),
            )
            check_group(group, layer, fmt)
            for target in read_names(group, "targets"):
                if target == _LINEAR:
                    default = layer
                else:
                    layers[to_pattern(target)] = layer
        attention = read_attention(of_attention, section.get("kv_cache_scheme"))
        return Config(
            default,
            exclude=[to_pattern(name) for name in read_names(section, "ignore")],
            layer_quant_config=layers,
            kv_cache_quant_config=attention.cache,
            kv_cache_post_rope=attention.post_rope,
            query_quant_config=attention.queries,
        )


def _read_groups(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups of ``config_groups``, without their names."""
    groups = section.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(
            f"compressed-tensors: config_groups must map names to groups, got {groups!r}."
        )
    return list(groups.values())


def _read_act_order(section: dict[str, Any]) -> dict[str, bool]:
    """Return patterns of names of layers -> whether files hold the group of each of their inputs.

    With ``actorder`` "weight" or "static", columns are rounded in another order, and groups stay.
    """
    patterns: dict[str, bool] = {}
    for group in _read_groups(section):
        args = group.get("weights")
        if args is not None:
            moves = args.get("actorder") in ("group", "dynamic", True)
            for target in read_names(group, "targets"):
                patterns["*" if target == _LINEAR else to_pattern(target)] = moves
    return dict(sorted(patterns.items(), key=lambda item: item[0] == "*"))


def _check_dense(section: dict[str, Any]) -> None:
    """Check that weights are dense."""
    sparsity = section.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError("compressed-tensors: sparse weights (sparsity_config) are not supported.")


def _check_shapes(reader: Any) -> None:
    """Check the stored shapes of weights in words of 32 bits, which nothing else here needs.

    Raises:
        ValueError: One is not (outputs, inputs) of its codes of 2 to 8 bits.
    """
    for key, entry in reader.entries.items():
        path, _, last = key.rpartition(".")
        words = reader.entries.get(f"{path}.weight_packed")
        if last != "weight_shape" or words is None:
            continue
        rows, count = tuple(words.shape)[-2:]
        is_pair = tuple(entry.shape) == (2,) and not entry.dtype.is_floating_point
        found = reader.tensor(key).tolist() if is_pair else []
        if not (found and found[0] == rows and 4 * count - 3 <= found[1] <= 16 * count):
            raise ValueError(
                f"{key} is {found or f'of the shape {tuple(entry.shape)}'}, expected two integers: "
                f"the {rows} outputs and the inputs that weight_packed holds in {count} words. "
                "The checkpoint is damaged."
            )
