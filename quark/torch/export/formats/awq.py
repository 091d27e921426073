"""The layout of AutoAWQ's GEMM kernels: ``quant_method`` "awq".

Per layer: ``qweight`` int32 [K, N/8] with codes in the interleaved order, ``qzeros`` int32
[K/g, N/8] likewise, ``scales`` [K/g, N] in the ``scale_type`` of the weight. Codes are unsigned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from quark.torch.export.formats.config_section import (
    group_size,
    named_config,
    names_in,
    required,
    unsigned_spec,
)
from quark.torch.export.formats.layouts.packed import PackedLayout
from quark.torch.export.formats.third_party import (
    ForeignFormat,
    group_of,
    integer_problem,
    shape_of,
    unsigned,
    weight_only_problem,
    with_weight,
    with_weights,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.nn.packed import Layout, Stored
from quark.torch.quantization.nn.quantizer import State

MIDDLES = -0x77777778  # eight codes of 8


class AwqLayout(PackedLayout):
    """Words of neighbouring outputs, interleaved, of codes without sign."""

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return codes, scales and zero points as they are stored."""
        return super().pack(unsigned(state), value)


class AwqFormat(ForeignFormat):
    """4-bit weights per group, read by Transformers with gptqmodel, AutoAWQ and vLLM."""

    name = "awq"
    holds = (
        "uint4 or int4 weights per group of a positive group_size, of Linear layers inside of the "
        "model's blocks with a multiple of 8 outputs, inputs in float"
    )
    renamed: ClassVar = {
        "weight": "qweight",
        "weight_scale": "scales",
        "weight_zero_point": "qzeros",
    }
    group: int

    @property
    def layout(self) -> Layout:
        """Layout of the tensors."""
        return AwqLayout("reorder")

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check the layers, and that the names of those in float do not match others too."""
        if self.options.pack_method != "reorder":
            raise ValueError("custom_mode='awq' has its own order of codes: leave out pack_method.")
        super().admit(layers, left)
        self.group = self.one_of_all(
            {name: group_of(layer.quant_config.weight) for name, layer in layers.items()}
        )
        for name in layers:
            inside = next((part for part in left if part in name), None)
            if inside:
                raise ValueError(
                    f"custom_mode='awq' leaves out layers by parts of names, and {inside}, in "
                    f"float, is part of {name}: exclude both, or use custom_mode='quark'."
                )

    def problem(self, name: str, layer: Any) -> str | None:
        """Return why a layer cannot be held, or None."""
        config = layer.quant_config
        problem = weight_only_problem(name, config) or integer_problem(config.weight, (4,))
        if problem is None and group_of(config.weight) <= 0:
            problem = "its weight has no groups"
        if problem is None and shape_of(layer)[0] % 8:
            problem = f"it has {shape_of(layer)[0]} outputs"
        return problem

    def section(self) -> dict[str, Any]:
        """Return what AutoAWQ writes; zero points are stored even where they are all the same."""
        return {
            "bits": 4,
            "group_size": self.group,
            "modules_to_not_convert": list(self.left),
            "quant_method": self.name,
            "version": "gemm",
            "zero_point": True,
        }

    def found(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers whose codes are stored, symmetric if all zero points are the middle."""
        layers = super().found(layers, reader)
        zeros = (reader.tensor(key) for key in reader.entries if key.endswith(".qzeros"))
        if not all((words == MIDDLES).all() for words in zeros):
            return layers
        self.config = with_weights(self.config, symmetric=True)
        return {name: with_weight(layer, symmetric=True) for name, layer in layers.items()}

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return uint4 per group for all layers but those named."""
        required(section, "bits", (4,), 4)
        required(section, "version", ("gemm", "GEMM"), "gemm")
        required(section, "zero_point", (True,), True)
        weight = unsigned_spec(4, group_size(section, 128), symmetric=False)
        left = names_in(section, "modules_to_not_convert")
        return named_config(QuantizationConfig(weight=weight), left or None)
