"""The format of gpt-oss: ``quant_method`` "mxfp4", experts in MXFP4. It is read, not written.

Per stacked parameter of E experts, N outputs and K inputs: ``…_blocks`` uint8 [E, N, K/32, 16], two
codes per byte, the first in the low bits; ``…_scales`` uint8 [E, N, K/32], exponents with the bias
127; ``…_bias`` [E, N] in float. All other layers are in float. Example of a byte: 0x2F holds the
codes 15 and 2, which are -6 and 1, times 2^(scale - 127).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from quark.torch.export.formats.config_section import read_names
from quark.torch.export.formats.quark import QuarkFormat
from quark.torch.export.formats.stacked_experts import StackedTensor, UnstackedReader
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import MX_BLOCK, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Format(QuarkFormat):
    """Stacked experts in MXFP4, inputs in float; each expert is a layer of Quark's own layout."""

    name = "mxfp4"
    transformers_packages: ClassVar = None
    stores_rotated_keys = False

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return MXFP4 weights for all layers; ``stored_layers`` leaves out those in float."""
        read_names(section, "modules_to_not_convert")
        weight = QuantizationSpec(
            Dtype.fp4,
            qscheme=QSchemeType.per_group,
            ch_axis=-1,
            group_size=MX_BLOCK,
            scale_format="e8m0",
            is_dynamic=False,
        )
        return Config(QuantizationConfig(weight=weight))

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers of the experts that are stored in blocks.

        Raises:
            ValueError: There are none.
        """
        in_blocks = {
            name: layer
            for name, layer in layers.items()
            if f"{_stacked(name)}{BLOCKS}" in reader.entries
        }
        if not in_blocks:
            raise ValueError(f"quant_method={self.name!r}, but no experts are stored in blocks.")
        exclude = [literal(name) for name in layers if name not in in_blocks]
        self.config = replace(self.config, exclude=exclude)
        return in_blocks

    def layer_reader(self, reader: Any, model: nn.Module) -> UnstackedReader:
        """Return a reader with codes, scales and bias of each expert."""
        kinds = {
            BLOCKS: StackedTensor("weight", merged_axes=2),
            SCALES: StackedTensor("weight_scale"),
            "_bias": StackedTensor("bias"),
        }
        return UnstackedReader(reader, model, kinds)

    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``.

        Stacked tensors, which no model has, get the names of a layer: summaries take them for one.
        """
        for end, part in ((BLOCKS, "weight"), (SCALES, "weight_scale")):
            if key.endswith(end):
                key = f"{key.removesuffix(end)}.{part}"
        return super().state_name(key)


def _stacked(layer: str) -> str:
    """Return the name of the stack of a layer: experts.gate_up_proj for experts.3.gate_up_proj."""
    path, _, part = layer.rpartition(".")
    return f"{path.rpartition('.')[0]}.{part}"
