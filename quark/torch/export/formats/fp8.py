"""The layout of fp8 checkpoints: ``quant_method`` "fp8".

Per layer: ``weight`` float8_e4m3fn [N, K]; one scale for the tensor, ``weight_scale`` [] and, where
inputs are static, ``input_scale`` []; or one for each block of the weight, ``weight_scale_inv``
[N/rows, K/columns], which it is multiplied by whatever the name says. An fp8 key-value cache adds
``k_scale`` and ``v_scale`` [] to the attention. Transformers reads blocks alone, vLLM both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quark.torch.export.formats.config_section import names_in, required
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.third_party import FP8, ForeignFormat
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.nn.packed import Layout

SCHEMES = ("static", "dynamic")
BLOCK_SCALE = "weight_scale_inv"


class Fp8Format(ForeignFormat):
    """Weights and inputs in fp8_e4m3, per tensor or in blocks."""

    name = "fp8"
    holds = (
        "Linear layers with fp8_e4m3 weights and inputs, both per tensor, the inputs static or "
        "dynamic, or weights per block and dynamic inputs per group of as many columns"
    )
    has_cache = True
    activations: str
    block: tuple[int, int] | None

    @property
    def layout(self) -> Layout:
        """Layout of the tensors."""
        return PackedLayout(self.options.pack_method)

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check the layers, all of one scheme."""
        super().admit(layers, left)
        configs = {name: layer.quant_config for name, layer in layers.items()}
        kinds = {
            name: (SCHEMES[bool(c.input_tensors.is_dynamic)], c.weight.block_size)
            for name, c in configs.items()
        }
        self.activations, self.block = self.one_of_all(kinds)

    def problem(self, name: str, layer: Any) -> str | None:
        """Return why a layer cannot be held, or None."""
        weight, inputs = layer.quant_config.weight, layer.quant_config.input_tensors
        if inputs is None:
            return "its input is not quantized"
        for what, spec in (("weight", weight), ("input", inputs)):
            if spec.dtype is not Dtype.fp8_e4m3 or spec.second_stage is not None:
                return f"its {what} is {spec.dtype.name}"
        whole = QSchemeType.per_tensor
        kinds = weight.scheme.qscheme, inputs.scheme.qscheme
        blocks = (QSchemeType.per_block, QSchemeType.per_group)
        fits = kinds == blocks and inputs.is_dynamic and inputs.group_size == weight.block_size[1]
        if kinds != (whole, whole) and not fits:
            return f"its weight is {kinds[0].name} and its input {kinds[1].name}"
        return None

    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, scales of blocks under their own name."""
        found = super().tensors(layer, scales)
        if self.block is not None:
            found[BLOCK_SCALE] = found.pop("weight_scale")
        return found

    def state_name(self, key: str) -> str:
        """Return the name in the state of the model."""
        return super().state_name(key.removesuffix("_inv") if key.endswith(BLOCK_SCALE) else key)

    def section(self) -> dict[str, Any]:
        """Return what vLLM and Transformers read."""
        return {
            "activation_scheme": self.activations,
            "ignored_layers": list(self.left),
            "kv_cache_scheme": "static" if self.cache else None,
            "quant_method": self.name,
            "weight_block_size": None if self.block is None else list(self.block),
        }

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return fp8 weights and inputs for all layers but those named."""
        is_dynamic = required(section, "activation_scheme", SCHEMES, "dynamic") == "dynamic"
        required(section, "scale_fmt", (None, "float"), None)
        required(section, "fmt", (None, "e4m3", "float8_e4m3fn"), None)
        cache = required(section, "kv_cache_scheme", (None, "static"), None)
        weight, block = FP8, section.get("weight_block_size")
        inputs = QuantizationSpec(
            Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, is_dynamic=is_dynamic
        )
        if block is not None:
            _check_block(block)
            weight = QuantizationSpec(
                Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=block, is_dynamic=False
            )
            inputs = QuantizationSpec(
                Dtype.fp8_e4m3,
                qscheme=QSchemeType.per_group,
                ch_axis=-1,
                group_size=block[1],
                is_dynamic=True,
            )
        left = names_in(section, "ignored_layers") or names_in(section, "modules_to_not_convert")
        cached = QuantizationConfig(output_tensors=FP8)
        return Config(
            QuantizationConfig(weight=weight, input_tensors=inputs),
            exclude=[literal(name) for name in left],
            kv_cache_quant_config={"*k_proj": cached, "*v_proj": cached} if cache else {},
        )


def _check_block(block: Any) -> None:
    sides = block if isinstance(block, list) else []
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(
            f"quant_method='fp8': weight_block_size={block!r} is no pair of positive integers."
        )
