"""The format of gpt-oss: ``quant_method`` "mxfp4", experts in MXFP4.

Per stacked parameter of E experts, N outputs and K inputs: ``…_blocks`` uint8 [E, N, K/32, 16], two
codes per byte, the first in the low bits; ``…_scales`` uint8 [E, N, K/32], exponents with the bias
127; ``…_bias`` [E, N] in float. All other layers are in float. Example of a byte: 0x2F holds the
codes 15 and 2, which are -6 and 1, times 2^(scale - 127).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.config_section import read_names
from quark.torch.export.formats.layer_checks import weight_shape, weight_spec
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import MX_BLOCK
from quark.torch.quantization.config.type import Dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.formats.stacked_experts import ExpertStacks, UnstackedReader
    from quark.torch.quantization.nn.layer import QuantizedLayer


BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
_SUPPORTED = (
    "Experts with biases whose weights Transformers stores stacked, such as those of gpt-oss, in "
    "MXFP4 (mxfp4_weight_only), inputs and all other layers in float"
)


class Mxfp4Format(ThirdPartyFormat):
    """Stacked experts in MXFP4, inputs in float; each expert is a layer of Quark's own layout."""

    name = "mxfp4"
    transformers_packages: ClassVar = None  # on a CPU, Transformers computes in bfloat16
    supported = _SUPPORTED
    stacks: ExpertStacks | None = None

    def check_model(self, model: nn.Module) -> None:
        """Record the stacked parameters of experts; ``layer_problem`` refuses other layers."""
        from quark.torch.export.formats.stacked_experts import ExpertStacks
        from quark.torch.quantization.nn.linear_experts import LinearExperts

        stacks: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            if not isinstance(module, LinearExperts):
                continue
            for name, stack in module.stacks.items():
                layers = [f"{path}.{place}" for place in stack.layer_names(module.num_experts)]
                if not stack.is_merged and all(_has_bias(model, layer) for layer in layers):
                    stacks[f"{path}.{name}"] = layers
        kinds = {"weight": BLOCKS, "weight_scale": SCALES, "bias": BIAS}
        self.stacks = ExpertStacks(stacks, kinds)

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        weight = weight_spec(layer)
        if not self.is_joined(f"{name}.weight"):
            return "it is no expert with a bias that Transformers stores stacked"
        if layer.quant_config.input_tensors is not None:
            return "its input is quantized"
        in_rows = weight.scheme.axis in (-1, 1) and weight.scheme.group == MX_BLOCK
        if weight.dtype is not Dtype.fp4 or weight.scheme.scale != E8M0 or not in_rows:
            return f"its weight is {weight.dtype.name} {weight.scheme.qscheme.name}"
        inputs = weight_shape(layer)[1]
        return f"its {inputs} inputs are no multiple of {MX_BLOCK}" if inputs % MX_BLOCK else None

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return codes, scales and bias of an expert; codes in blocks of 16 bytes."""
        tensors = super().layer_tensors(layer, scales)
        codes = tensors["weight"]
        return tensors | {"weight": codes.reshape(len(codes), -1, MX_BLOCK // 2)}

    def is_joined(self, key: str) -> bool:
        """Whether a tensor becomes part of a stacked one."""
        return self.stacks is not None and key in self.stacks

    def join(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors with those of all experts stacked."""
        return state if self.stacks is None else self.stacks.join(state)

    def config_section(self) -> dict[str, Any]:
        """Return the section that Transformers reads."""
        return {"quant_method": self.name, "modules_to_not_convert": list(self.float_layers)}

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return MXFP4 weights for all layers; ``stored_layers`` leaves out those in float."""
        read_names(section, "modules_to_not_convert")
        return Config(scheme("mxfp4_weight_only"))

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
        from quark.torch.export.formats.stacked_experts import StackedTensor, UnstackedReader

        kinds = {
            BLOCKS: StackedTensor("weight", merged_axes=2),
            SCALES: StackedTensor("weight_scale"),
            BIAS: StackedTensor("bias"),
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


def _has_bias(model: nn.Module, layer: str) -> bool:
    """Whether a layer has a bias."""
    return getattr(model.get_submodule(layer), "bias", None) is not None
