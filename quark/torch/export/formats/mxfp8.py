"""The format of MXFP8 in Transformers: ``quant_method`` "mxfp8", which needs no other package.

Per layer of N outputs and K inputs: ``weight`` float8_e4m3fn [N, K] and ``weight_scale_inv`` uint8
[N, K/32], exponents with the bias 127. Despite its name, codes are multiplied by the scale. Inputs
are quantized in the same blocks. Experts may be stored stacked, as in the format "fp8".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.config_section import read_choice, read_names
from quark.torch.export.formats.layer_checks import weight_spec
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import MX_BLOCK, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

if TYPE_CHECKING:
    from torch import nn

    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


BLOCK = [1, MX_BLOCK]


class Mxfp8Format(ThirdPartyFormat):
    """Weights and inputs in MXFP8 (E4M3)."""

    name = "mxfp8"
    transformers_packages: ClassVar = {"accelerate": "accelerate"}
    needs_gpu_for_inputs = True
    supported = "Linear layers with weights and dynamic inputs in MXFP8 (mxfp8)"
    tensor_names: ClassVar = {"weight_scale": "weight_scale_inv"}

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.packed import PackedLayout

        return PackedLayout(self.options.pack_method)

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        weight, inputs = weight_spec(layer), layer.quant_config.input_tensors
        if inputs is None:
            return "its input is not quantized"
        for tensor, spec in (("weight", weight), ("input", inputs)):
            if not _is_mxfp8(spec):
                return f"its {tensor} is {spec.dtype.name} {spec.scheme.qscheme.name}"
        return None if inputs.is_dynamic else "its input is static"

    def layer_reader(self, reader: Any, model: nn.Module) -> Any:
        """Return a reader with the tensors of each expert."""
        from quark.torch.export.formats.stacked_experts import FP8_STACKS, UnstackedReader

        return UnstackedReader(reader, model, FP8_STACKS)

    def config_section(self) -> dict[str, Any]:
        """Return the section that Transformers reads."""
        return {
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(self.float_layers),
            "quant_method": self.name,
            "scale_fmt": "ue8m0",
            "weight_block_size": list(BLOCK),
        }

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return MXFP8 weights and inputs for all layers but those excluded."""
        read_choice(section, "activation_scheme", ("dynamic",), "dynamic")
        read_choice(section, "weight_block_size", (BLOCK,), BLOCK)
        read_choice(section, "scale_fmt", ("ue8m0", "float", None), None)
        excluded = read_names(section, "modules_to_not_convert")
        excluded = excluded or read_names(section, "ignored_layers")
        return Config(scheme("mxfp8"), exclude=[literal(name) for name in excluded])


def _is_mxfp8(spec: QuantizationSpec) -> bool:
    """Whether a tensor is in E4M3 with shared exponents of 32 values of a row."""
    form = spec.scheme
    is_block = form.group == MX_BLOCK and form.axis in (-1, 1) and spec.second_stage is None
    return spec.fmt == Dtype.fp8_e4m3.value and form.scale == E8M0 and is_block
