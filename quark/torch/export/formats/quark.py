"""The format of Quark: codes and scales beside each other, the whole configuration in config.json.

Per tensor of a layer: ``weight`` and ``bias`` hold packed codes, ``weight_scale``,
``weight_zero_point``, ``input_scale``, … what they need. Scales are [] per tensor, [channels] per
channel and a grid per group. Integer weights per group are stored transposed, so that one word
holds neighbouring output channels. ``input_rotation`` is (n, n) int8 +-1, to be divided by the root
of n: inputs are multiplied by it, n at a time, before they are quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from quark.torch.export.checks import check_state
from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import names_in
from quark.torch.export.formats.layouts.act_order import PROBLEM, has_order
from quark.torch.export.formats.layouts.packed import PackedLayout, ValueLayout
from quark.torch.numerics.qdq import fake_quantize, quantize
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.nn.layer import PARAMETERS, QuantMixin, activation_shape
from quark.torch.quantization.nn.operators import operator
from quark.torch.quantization.nn.packed import SHORT_NAMES, Layout, PackedMixin
from quark.torch.quantization.nn.quantizer import State

_SUFFIXES = {
    f"{short}_{part}": f"{short}_quantizer.{part}"
    for short in SHORT_NAMES.values()
    for part in ("scale", "zero_point")
}


class QuarkFormat(ExportFormat):
    """Quark's own checkpoint, read by Transformers, vLLM and this package."""

    name = "quark"

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return the configuration, its patterns checked."""
        for key in ("exclude", "kv_cache_group"):
            if not isinstance(section.get(key), str):
                names_in(section, key)
        return Config.from_dict(section)

    @property
    def layout(self) -> Layout:
        """Layout of the tensors under the options and the version of the configuration."""
        is_current = not str(self.config.version or "0").startswith("0")
        if self.options.weight_format == "fake_quantized":
            return ValueLayout(is_current)
        return PackedLayout(self.options.pack_method, is_current)

    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return weight, bias, scales, zero points and rotation of a layer as they are stored."""
        assert isinstance(layer, (QuantMixin, PackedMixin))
        found: dict[str, torch.Tensor] = {}
        if layer.input_rotation is not None:
            found["input_rotation"] = layer.input_rotation.clone()  # layers may share one
        for name, short in SHORT_NAMES.items():
            value = layer.value(name)
            value = None if value is None else value.detach()
            state = layer.state(name)
            if state is None:
                if value is not None:
                    found[name] = value
                continue
            if name in scales:
                codes, how = None, (scales[name], state.zero_point, state.spec.scheme)
                if value is not None:
                    value, codes = fake_quantize(value, *how), quantize(value, *how)
                state = state._replace(scale=scales[name], codes=codes)
            check_state(state, name.removesuffix("_tensors"))
            _check_channels(layer, name, state)
            for part, tensor in self.layout.pack(state, value).items():
                found[f"{short}_{part}" if part else name] = tensor
        return found

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check that groups of inputs are where readers look for them."""
        name = next((name for name, layer in layers.items() if has_order(layer)), None)
        if name is not None:
            raise ValueError(
                f"custom_mode={self.name!r} cannot hold {name}: {PROBLEM}. custom_mode='gptq' can; "
                "for others quantize the float model again."
            )

    def receive(self, module: nn.Module, layer: QuantizationConfig) -> nn.Module:
        """Turn a float layer in place into one ready to take the stored tensors."""
        return operator(type(module)).packed.from_module(module, layer, self.layout)

    def state_name(self, key: str) -> str:
        """Return ``….weight_quantizer.scale`` for ``….weight_scale`` and so on."""
        head, _, last = key.rpartition(".")
        return f"{head}.{_SUFFIXES[last]}" if head and last in _SUFFIXES else key

    def section(self) -> dict[str, Any]:
        """Return the whole configuration with the options of the export."""
        written = replace(self.config, export=None).to_dict()
        written |= {"export": asdict(self.options), "quant_method": "quark"}
        return dict(sorted(written.items()))


def _check_channels(layer: nn.Module, name: str, state: State) -> None:
    """Raise if scales of inputs or outputs are not those of channels, as readers take them to be.

    Raises:
        ValueError: They are those of another axis.
    """
    if name in PARAMETERS or state.scale is None:
        return
    expected = state.scheme.scale_shape(activation_shape(layer, name, state.scheme))
    if tuple(state.scale.shape) != expected:
        what = name.removesuffix("_tensors")
        raise ValueError(
            f"its {what} has {state.scale.numel()} scales along ch_axis={state.scheme.axis}, but "
            f"{expected[0]} channels. Scales of other axes cannot be stored: give ch_axis the axis "
            "of the channels, -1 for a Linear."
        )
