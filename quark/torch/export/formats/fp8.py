"""The format of fp8 checkpoints: ``quant_method`` "fp8".

Per layer of N outputs and K inputs: ``weight`` float8_e4m3fn [N, K], with either ``weight_scale``
[] and, for static inputs, ``input_scale`` []; or one scale per block of the weight,
``weight_scale_inv`` [N/rows, K/columns]. Despite its name, codes are multiplied by it. An fp8
key-value cache adds ``k_scale`` and ``v_scale`` [] to the attention. Transformers reads only the
layout with blocks, vLLM reads both.

Other tools differ in names and types, which are read: ``weight_scale_inv`` [] and
``activation_scale`` per tensor; scales in the type float8_e8m0fnu; experts stacked, as
``experts.gate_up_proj`` and ``experts.gate_up_proj_scale_inv``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.config_section import read_choice, read_names
from quark.torch.export.formats.kv_cache import STATIC_FP8, kv_cache_config
from quark.torch.export.formats.layer_checks import weight_spec
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.files import TensorHeader
    from quark.torch.export.formats.stacked_experts import UnstackedReader
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


ACTIVATION_SCHEMES = ("static", "dynamic")
BLOCK_SCALE = "weight_scale_inv"
_OTHER_NAMES = {BLOCK_SCALE: "weight_scale", "activation_scale": "input_scale"}

logger = logging.getLogger(__name__)


class Fp8Format(ThirdPartyFormat):
    """Weights and inputs in fp8_e4m3, per tensor or in blocks."""

    name = "fp8"
    transformers_packages: ClassVar = {"accelerate": "accelerate"}
    needs_gpu_for_inputs = True
    supported = (
        "Linear layers with fp8_e4m3 weights and inputs, both per tensor, the inputs static or "
        "dynamic, or weights per block and dynamic inputs per group of as many columns"
    )
    supports_kv_cache = True
    activation_scheme: str
    block_size: tuple[int, int] | None

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.packed import PackedLayout

        return PackedLayout(self.options.pack_method)

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and that all have one scheme."""
        super().check_writable(layers, float_layers)
        schemes = {name: _scheme(layer) for name, layer in layers.items()}
        self.activation_scheme, self.block_size = self.common_scheme(schemes)

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        weight, inputs = weight_spec(layer), layer.quant_config.input_tensors
        if inputs is None:
            return "its input is not quantized"
        for tensor, spec in (("weight", weight), ("input", inputs)):
            if spec.dtype is not Dtype.fp8_e4m3 or spec.second_stage is not None:
                return f"its {tensor} is {spec.dtype.name}"
        both = weight.scheme.qscheme, inputs.scheme.qscheme
        per_tensor = both == (QSchemeType.per_tensor, QSchemeType.per_tensor)
        # Blocks of 128 x 128 weights need dynamic inputs in groups of 128.
        in_blocks = both == (QSchemeType.per_block, QSchemeType.per_group)
        columns = weight.block_size[1] if weight.block_size else None
        aligned = in_blocks and inputs.is_dynamic and inputs.group_size == columns
        if not (per_tensor or aligned):
            return f"its weight is {both[0].name} and its input {both[1].name}"
        return None

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer; scales of blocks are called ``weight_scale_inv``."""
        tensors = super().layer_tensors(layer, scales)
        if self.block_size is not None:
            tensors[BLOCK_SCALE] = tensors.pop("weight_scale")
        return tensors

    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``."""
        path, _, last = key.rpartition(".")
        key = f"{path}.{_OTHER_NAMES[last]}" if last in _OTHER_NAMES else key
        return super().state_name(key)

    def layer_reader(self, reader: Any, model: nn.Module) -> Any:
        """Return a reader with codes and float32 scales of each layer."""
        from quark.torch.export.formats.stacked_experts import FP8_STACKS, UnstackedReader

        return _WideScales(UnstackedReader(reader, model, FP8_STACKS))

    def config_section(self) -> dict[str, Any]:
        """Return the section that vLLM and Transformers read."""
        return {
            "activation_scheme": self.activation_scheme,
            "ignored_layers": list(self.float_layers),
            "kv_cache_scheme": "static" if self.has_kv_cache else None,
            "quant_method": self.name,
            "weight_block_size": None if self.block_size is None else list(self.block_size),
        }

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return fp8 weights and inputs for all layers but those excluded."""
        known = (*ACTIVATION_SCHEMES, None)  # None: inputs in float
        activations = read_choice(section, "activation_scheme", known, "dynamic")
        is_dynamic = activations == "dynamic"
        if read_choice(section, "scale_fmt", (None, "float", "ue8m0"), None) == "ue8m0":
            logger.warning(
                "scale_fmt='ue8m0': the scales of inputs are not rounded up to powers of two."
            )
        read_choice(section, "fmt", (None, "e4m3", "float8_e4m3fn"), None)
        kv_cache = read_choice(section, "kv_cache_scheme", (None, "static"), None)
        weight, block = STATIC_FP8, section.get("weight_block_size")
        inputs = QuantizationSpec(
            Dtype.fp8_e4m3, qscheme=QSchemeType.per_tensor, is_dynamic=is_dynamic
        )
        if block is not None:
            _check_block(block)
            weight = QuantizationSpec(
                Dtype.fp8_e4m3,
                qscheme=QSchemeType.per_block,
                block_size=block,
                symmetric=True,
                is_dynamic=False,
            )
            inputs = QuantizationSpec(
                Dtype.fp8_e4m3,
                qscheme=QSchemeType.per_group,
                ch_axis=-1,
                group_size=block[1],
                symmetric=True,
                is_dynamic=True,
            )
        excluded = read_names(section, "ignored_layers")
        excluded = excluded or read_names(section, "modules_to_not_convert")
        return Config(
            QuantizationConfig(weight=weight, input_tensors=inputs if activations else None),
            exclude=[literal(name) for name in excluded],
            kv_cache_quant_config=kv_cache_config(STATIC_FP8 if kv_cache else None),
        )


class _WideScales:
    """Tensors of another reader, with scales in float32 that are stored as float8_e8m0fnu."""

    def __init__(self, reader: UnstackedReader) -> None:
        import torch

        self.reader = reader
        self.entries: dict[str, TensorHeader] = {
            key: entry._replace(dtype=torch.float32, stored_bytes=entry.nbytes)
            if entry.dtype is torch.float8_e8m0fnu
            else entry
            for key, entry in reader.entries.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return self.reader.tensor(key).to(self.entries[key].dtype)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self.reader.tensors():
            yield key, tensor.to(self.entries[key].dtype)


def _scheme(layer: QuantizedLayer) -> tuple[str, tuple[int, int] | None]:
    """Return activation scheme and block size of a layer."""
    inputs = layer.quant_config.input_tensors
    assert inputs is not None
    return ACTIVATION_SCHEMES[bool(inputs.is_dynamic)], weight_spec(layer).block_size


def _check_block(block: Any) -> None:
    """Check that ``weight_block_size`` is [rows, columns]."""
    sides = block if isinstance(block, list) else []
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(
            f"quant_method='fp8': weight_block_size={block!r} is not a pair of positive integers."
        )
