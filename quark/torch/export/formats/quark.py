"""Quark's own format: packed codes with scales beside them, the configuration in config.json.

Per layer: ``weight`` and ``bias`` hold packed codes or float values; ``weight_scale``,
``weight_zero_point``, ``input_scale`` and so on hold static scales and zero points. Scales are []
per tensor, [channels] per channel, and a grid of blocks per group. Integer weights per group are
stored transposed, so that one word holds neighbouring output channels. ``input_rotation`` is (n, n)
int8 of +1 and -1: divided by the square root of n, it multiplies each n inputs before they are
quantized. Before that, inputs are multiplied by ``input_prescale`` (inputs,). ``low_rank_down``
(rank, inputs) and ``low_rank_up`` (outputs, rank) multiply inputs after both, before these are
quantized; their product is added to the outputs. An attention module with quantized probabilities
has their scale, ``prob_output_scale``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import read_names
from quark.torch.export.formats.earlier_versions import check_readable, is_earlier
from quark.torch.numerics.dtypes import ITEM_SIZES, type_name
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.tensor_names import LOW_RANK, PARAMETERS, PRESCALE, SHORT_NAMES
from quark.torch.quantization.config.type import QSchemeType

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.headers import Entry
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.quantizer import QuantizedTensor
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


_SUFFIXES = {
    f"{short}_{part}": f"{short}_quantizer.{part}"
    for short in (*SHORT_NAMES.values(), "prob_output")
    for part in ("scale", "zero_point")
}


class QuarkFormat(ExportFormat):
    """Quark's own checkpoint, read by Transformers, vLLM and this package."""

    name = "quark"
    transformers_packages: ClassVar[Mapping[str, str] | None] = {}
    stores_rotated_keys = True
    stores_probabilities = True

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return the configuration that the section holds in full.

        Raises:
            ValueError: It has an unknown key, or ``exclude`` is not a list of names.
        """
        for key in ("exclude", "kv_cache_group"):
            if not isinstance(section.get(key), str):
                read_names(section, key)
        return Config.from_dict(section)

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors, by the options and the version of the configuration."""
        from quark.torch.export.formats.layouts.earlier import (
            EarlierPackedLayout,
            EarlierValueLayout,
        )
        from quark.torch.export.formats.layouts.packed import PackedLayout, ValueLayout

        earlier, pack_method = is_earlier(self.config), self.options.pack_method
        if self.options.weight_format == "fake_quantized":
            return EarlierValueLayout() if earlier else ValueLayout()
        return EarlierPackedLayout(pack_method) if earlier else PackedLayout(pack_method)

    def layout_of(self, config: QuantizationConfig) -> TensorLayout:
        """Return the layout of the tensors of a layer with this configuration."""
        return self.layout

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers without experts that are stored stacked, in float.

        AMD Quark leaves them in float if the configuration excludes only other layers.
        """
        owners = {name.rpartition(".")[0] for name in reader.entries}
        return {
            name: layer
            for name, layer in layers.items()
            if name in owners or not owners & _stacks_of(name)
        }

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the stored weight, bias, scales, zero points and rotation of a layer."""
        from quark.torch.export.checks import check_state
        from quark.torch.numerics.qdq import fake_quantize, quantize

        tensors: dict[str, torch.Tensor] = {}
        layout = self.layout_of(layer.quant_config)
        if layer.input_rotation is not None:
            tensors["input_rotation"] = layer.input_rotation.clone()  # layers may share one
        for name in (PRESCALE, *LOW_RANK):
            added = getattr(layer, name)
            if added is not None:
                tensors[name] = added.detach()
        for name, short in SHORT_NAMES.items():
            state = layer.quantized_tensor(name)
            needs_value = state is None or name in scales or layout.stores_values
            value = layer.value(name) if needs_value else None
            value = None if value is None else value.detach()
            if state is None:
                if value is not None:
                    tensors[name] = value
                continue
            if name in scales:
                codes, qparams = None, (scales[name], state.zero_point, state.spec.scheme)
                if value is not None:
                    value, codes = fake_quantize(value, *qparams), quantize(value, *qparams)
                state = state._replace(scale=scales[name], codes=codes)
            check_state(state, name.removesuffix("_tensors"))
            _check_channels(layer, name, state)
            for part, tensor in layout.pack(state, value).items():
                tensors[f"{short}_{part}" if part else name] = tensor
        return tensors

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check that no layer has act order, which the format cannot hold."""
        from quark.torch.export.formats.layouts.act_order import ACT_ORDER_PROBLEM, has_act_order

        name = next((name for name, layer in layers.items() if has_act_order(layer)), None)
        if name is not None:
            raise ValueError(
                f"custom_mode={self.name!r} cannot hold {name}: {ACT_ORDER_PROBLEM}. "
                "custom_mode='gptq' can; for others quantize the float model again."
            )

    def check_readable(self) -> None:
        """Check that the checkpoint holds what its configuration describes.

        Raises:
            ValueError: An earlier version lost values when it was written, or the configuration
                has something that is not supported.
        """
        check_readable(self.config, self.options)

    def prepare_for_load(self, module: nn.Module, layer: QuantizationConfig) -> nn.Module:
        """Replace a float layer in place by an empty one that accepts the stored tensors."""
        from quark.torch.quantization.nn.operators import operator

        return operator(type(module)).packed.from_module(module, layer, self.layout_of(layer))

    def state_name(self, key: str) -> str:
        """Return ``….weight_quantizer.scale`` for ``….weight_scale``, and so on."""
        path, _, last = key.rpartition(".")
        return f"{path}.{_SUFFIXES[last]}" if path and last in _SUFFIXES else key

    def weight_count(self, spec: QuantizationSpec, codes: Entry, scale: Entry | None) -> int:
        """Return the number of weights; see ``ExportFormat.weight_count``."""
        last = spec.coded.for_parameter()
        fmt = last.fmt
        if fmt.word_codes == 1 or type_name(codes.dtype) != fmt.storage_type:
            return prod(codes.shape)  # an element each: wide codes, values, or old 2-bit codes
        row = codes.shape[-1] * ITEM_SIZES[fmt.storage_type] * 8 // fmt.bits
        if last.qscheme is QSchemeType.per_group and last.scheme.has_zero_point:
            assert scale is not None
            if scale.shape[0] != codes.shape[0]:  # stored (in, out), scales (groups, out)
                row = min(row, scale.shape[-1])
            elif last.scheme.group > 0:
                row = min(row, scale.shape[-1] * last.scheme.group)
        return prod(codes.shape[:-1]) * row

    def config_section(self) -> dict[str, Any]:
        """Return the whole configuration with the options of the export."""
        section = replace(_with_stated_symmetry(self.config), export=None).to_dict()
        section |= {"export": asdict(self.options), "quant_method": "quark"}
        return dict(sorted(section.items()))


def _with_stated_symmetry(config: Config) -> Config:
    """Return a configuration that states the symmetry of layers with floats in blocks of two axes.

    Floats are symmetric in any case, so specifications may leave it open. vLLM asks for it.
    """

    def stated(layer: QuantizationConfig) -> QuantizationConfig:
        weight, inputs = layer.weight, layer.input_tensors
        if weight is None or weight.qscheme is not QSchemeType.per_block:
            return layer
        return replace(layer, weight=symmetric(weight), input_tensors=symmetric(inputs))

    def symmetric(spec: QuantizationSpec | None) -> QuantizationSpec | None:
        if spec is None or not spec.fmt.is_float or spec.symmetric is not None:
            return spec
        return replace(spec, symmetric=True)

    layers = {name: stated(layer) for name, layer in config.layer_quant_config.items()}
    types = {kind: stated(layer) for kind, layer in config.layer_type_quant_config.items()}
    return replace(
        config,
        global_quant_config=stated(config.global_quant_config),
        layer_quant_config=layers,
        layer_type_quant_config=types,
    )


def _stacks_of(name: str) -> set[str]:
    """Return the list of experts around a layer: ``mlp.experts`` for ``mlp.experts.3.w1``."""
    parts = re.match(r"(.+)\.\d+\.[^.]+$", name)
    return {parts[1]} if parts else set()


def _check_channels(layer: QuantizedLayer, name: str, state: QuantizedTensor) -> None:
    """Check that static scales of inputs and outputs are per tensor or per channel.

    Raises:
        ValueError: They lie along another axis, which no reader expects.
    """
    if name in PARAMETERS or state.scale is None:
        return
    expected = state.scheme.scale_shape(layer.shape(name))
    if tuple(state.scale.shape) != expected:
        what = name.removesuffix("_tensors")
        raise ValueError(
            f"its {what} has {state.scale.numel()} scales along ch_axis={state.scheme.axis}, but "
            f"{expected[0]} channels. Scales of other axes cannot be stored: give ch_axis the axis "
            "of the channels, -1 for a Linear."
        )
