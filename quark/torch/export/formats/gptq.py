"""The format of AutoGPTQ and gptqmodel: ``quant_method`` "gptq".

Per layer of N outputs and K inputs in groups of g, with unsigned codes of b bits: ``qweight`` int32
[K*b/32, N], words of neighbouring inputs; ``qzeros`` int32 [K/g, N*b/32], words of neighbouring
outputs; ``scales`` [K/g, N] in the ``scale_type`` of the weight; ``g_idx`` int32 [K], the group of
each input. ``checkpoint_format`` "gptq" stores zero points minus one. A zero point of 0 is lost
that way, so asymmetric weights are written as "gptq_v2".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import (
    IN_BLOCKS,
    config_for_blocks,
    read_choice,
    read_group_size,
    read_names,
    to_pattern,
    unsigned_weight_spec,
)
from quark.torch.export.formats.layer_checks import (
    integer_weight_problem,
    weight_group_size,
    weight_only_problem,
    weight_shape,
    weight_spec,
)
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.dtypes import type_name
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.quantization.config.spec import QuantizationSpec
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout

BITS = (2, 3, 4, 8)
V1, V2 = "gptq", "gptq_v2"  # values of checkpoint_format
# Options of a layer in ``dynamic`` that say how its codes were chosen, not how they are stored.
_OF_ALGORITHM = {"act_group_aware", "damp_percent", "desc_act", "mse", "static_groups"}


class GptqFormat(ThirdPartyFormat):
    """2, 3, 4 or 8-bit weights, read by Transformers with gptqmodel, and by vLLM."""

    name = "gptq"
    transformers_packages: ClassVar = {"gptqmodel": "gptqmodel", "optimum": "optimum"}
    supported = (
        "integer weights of 2, 3, 4 or 8 bits per group or per channel, of Linear layers inside of "
        "the model's blocks with multiples of 32 inputs and outputs, inputs in float"
    )
    tensor_names: ClassVar = {
        "weight": "qweight",
        "weight_scale": "scales",
        "weight_zero_point": "qzeros",
        "weight_groups": "g_idx",
    }
    supports_act_order = True
    code_names = ("qweight",)
    has_desc_act = False  # whether the section of a checkpoint says so

    def __init__(self, config: Config, options: JsonExporterConfig) -> None:
        super().__init__(config, options)
        layers = (config.global_quant_config, *config.layer_quant_config.values())
        weights = [layer.weight for layer in layers if layer.weight is not None]
        self.symmetric = all(weight.symmetric is not False for weight in weights)
        self.zero_offset = int(self.symmetric)

    @classmethod
    def from_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format of a checkpoint, with the zero offset of its ``checkpoint_format``."""
        fmt = cls(cls.parse_section(section), JsonExporterConfig())
        fmt.zero_offset = int(section.get("checkpoint_format", V1) == V1)
        fmt.has_desc_act = section.get("desc_act") is True
        return fmt

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.gptq import GptqLayout

        return self.with_act_order(GptqLayout(self.zero_offset))

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers stored in codes, after checking their zero points and groups.

        Raises:
            ValueError: Zero points contradict ``sym`` or ``checkpoint_format``, or ``g_idx``
                contradicts ``group_size`` or is missing.
        """
        layers = super().stored_layers(layers, reader)
        for name, layer in layers.items():
            key = f"{name}.qzeros"
            entry = reader.entries.get(key)
            is_words = entry is not None and type_name(entry.dtype) == "int32" and len(entry.shape)
            if layer.weight is not None and is_words:
                self._check_zeros(reader.tensor(key), layer.weight, key)
        return layers

    def needs_groups(self, name: str) -> bool:
        """Whether the section says that the file has the group of each input of a layer."""
        return self.has_desc_act

    def _check_zeros(self, words: torch.Tensor, weight: QuantizationSpec, key: str) -> None:
        """Raise if stored zero points cannot be those of a layer."""
        from quark.torch.export.formats.layouts.dense_words import unpack_words

        bits = weight.fmt.bits
        zeros = unpack_words(words, bits, words.shape[-1] * 32 // bits)
        middle = (1 << (bits - 1)) - self.zero_offset
        if weight.symmetric is not False and (zeros != middle).any():
            other = next(zero for zero in zeros.flatten().tolist() if zero != middle)
            stored_by = V1 if self.zero_offset else V2
            raise ValueError(
                f"{key}: a zero point is stored as {other}, expected {middle} for sym=True, "
                f"bits={bits} and checkpoint_format={stored_by!r}. Correct these values in "
                "config.json."
            )
        # 0 - 1 wraps around to the largest code: readers that add one get 16, not 0.
        lost = self.zero_offset and weight.symmetric is False
        if lost and (zeros == (1 << bits) - 1).any():
            raise ValueError(
                f"{key}: zero points less one, as checkpoint_format={V1!r} stores "
                "them, have lost 0 here. Convert the checkpoint to gptq_v2 with its tool."
            )

    def layer_reader(self, reader: Any, model: nn.Module) -> Any:
        """Return a reader without the biases of zeros that AutoGPTQ adds to layers."""
        from quark.torch.export.formats.zero_biases import without_zero_biases

        return without_zero_biases(reader, model)

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and that all have one scheme.

        Raises:
            ValueError: The format cannot hold a layer, or two layers differ.
        """
        super().check_writable(layers, float_layers)
        weights = {name: weight_spec(layer) for name, layer in layers.items()}
        self.bits, self.group_size, self.symmetric = self.common_scheme(
            {
                name: (weight.fmt.bits, weight_group_size(weight), weight.symmetric is not False)
                for name, weight in weights.items()
            }
        )
        self.zero_offset = int(self.symmetric)
        some_in_float = any(fnmatch.fnmatchcase(name, IN_BLOCKS) for name in float_layers)
        self.listed_layers = list(layers) if some_in_float else None

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        problem = weight_only_problem(name, layer.quant_config)
        if problem is None and any(size % 32 for size in weight_shape(layer)):
            problem = f"its weight has the shape {weight_shape(layer)}"
        return problem or integer_weight_problem(weight_spec(layer), BITS)

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, including ``g_idx``."""
        import torch

        inputs = weight_shape(layer)[1]
        size = self.group_size if self.group_size > 0 else inputs
        g_idx = torch.arange(inputs, dtype=torch.int32, device="cpu") // size
        return {"g_idx": g_idx, **super().layer_tensors(layer, scales)}  # act order overrides it

    def config_section(self) -> dict[str, Any]:
        """Return the section as gptqmodel writes it."""
        section = {
            "bits": self.bits,
            "checkpoint_format": V1 if self.symmetric else V2,
            "desc_act": self.has_act_order,
            "group_size": self.group_size,
            "lm_head": False,
            "quant_method": self.name,
            "sym": self.symmetric,
        }
        if self.listed_layers is not None:
            section["modules_in_block_to_quantize"] = [self.listed_layers]
        return section

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return unsigned integers for the listed layers, else for the layers of the blocks."""
        read_choice(section, "desc_act", (True, False), False)  # g_idx decides
        read_choice(section, "checkpoint_format", (V1, V2), V1)
        head = read_choice(section, "lm_head", (True, False), False)
        layer = _read_layer(section)
        overrides = _read_overrides(section)
        config = config_for_blocks(layer)
        key = "modules_in_block_to_quantize"
        groups = section.get(key)
        if groups:
            # Nested in groups of layers that share an input: [["q_proj", "k_proj"], ["o_proj"]].
            lists = [group if isinstance(group, list) else [group] for group in groups]
            names = read_names({key: [name for names in lists for name in names]}, key)
            patterns = {f"*{literal(name)}": layer for name in names}
            config = Config(QuantizationConfig(), layer_quant_config=patterns)
        if head:
            config.layer_quant_config["lm_head"] = layer
        config.layer_quant_config = {**overrides, **config.layer_quant_config}
        return config


def _read_layer(section: Mapping[str, Any]) -> QuantizationConfig:
    """Return the configuration of the layers that a section, or an override, describes."""
    bits = read_choice(section, "bits", BITS, 4)
    symmetric = read_choice(section, "sym", (True, False), True)
    weight = unsigned_weight_spec(bits, read_group_size(section, 128), symmetric)
    return QuantizationConfig(weight=weight)


def _read_overrides(section: Mapping[str, Any]) -> dict[str, QuantizationConfig]:
    """Return the layers of ``dynamic`` by pattern; the first that matches a name counts.

    Keys are regular expressions. After ``-:``, layers stay in float; after ``+:`` or nothing, they
    have other values of ``bits``, ``group_size`` or ``sym``.

    Raises:
        ValueError: An expression or an option is not supported.
    """
    given = section.get("dynamic") or {}
    layers: dict[str, QuantizationConfig] = {}
    for key, options in given.items():
        expression = key.removeprefix("+:").removeprefix("-:")
        pattern = to_pattern(f"re:{expression}", "quant_method='gptq': dynamic")
        if key.startswith("-:"):
            layers.setdefault(pattern, QuantizationConfig())
            continue
        others = sorted(set(options) - {"bits", "group_size", "sym"} - _OF_ALGORITHM)
        if others:
            raise ValueError(
                f"quant_method='gptq': dynamic[{key!r}] has {', '.join(others)}, which is not "
                "supported (supported: bits, group_size, sym). Quantize the layer without it."
            )
        layers.setdefault(pattern, _read_layer({**section, **options}))
    return layers
