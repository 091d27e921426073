"""The layout of AutoGPTQ and gptqmodel: ``quant_method`` "gptq".

Per layer: ``qweight`` int32 [K*bits/32, N], words of neighbouring inputs; ``qzeros`` int32
[K/g, N*bits/32], words of neighbouring outputs; ``scales`` [K/g, N] in the ``scale_type`` of the
weight; ``g_idx`` int32 [K], the group of each input. Codes are unsigned. ``checkpoint_format``
"gptq" stores zero points less one, which loses 0, so asymmetric weights are written as "gptq_v2".
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import (
    IN_BLOCKS,
    group_size,
    named_config,
    names_in,
    required,
    unsigned_spec,
)
from quark.torch.export.formats.third_party import (
    ForeignFormat,
    from_words,
    group_of,
    integer_problem,
    shape_of,
    to_words,
    unsigned,
    weight_only_problem,
)
from quark.torch.numerics.scale_codec import stored_dtype
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.packed import Declared, Layout, Stored
from quark.torch.quantization.nn.quantizer import State

BITS = (2, 3, 4, 8)
CLASSIC, SECOND = "gptq", "gptq_v2"


class GptqLayout:
    """Words of neighbouring inputs, of codes without sign.

    Args:
        zero_offset: What is taken from zero points, modulo the number of codes.
    """

    def __init__(self, zero_offset: int) -> None:
        self.zero_offset = zero_offset

    def declare(self, spec: QuantizationSpec, shape: tuple[int, ...], is_stored: bool) -> Declared:
        """Return shape and type of codes, scales and zero points."""
        (outputs, inputs), bits = shape, spec.fmt.bits
        groups = spec.scheme.scale_shape(shape)[1]
        return {
            "": ((inputs * bits // 32, outputs), torch.int32),
            "scale": ((groups, outputs), stored_dtype(spec.scheme)),
            "zero_point": ((groups, outputs * bits // 32), torch.int32),
        }

    def pack(self, state: State, value: torch.Tensor | None) -> Stored:
        """Return codes, scales and zero points as they are stored."""
        bits = state.scheme.fmt.bits
        state = unsigned(state)
        assert state.codes is not None and state.scale is not None and state.zero_point is not None
        outputs = len(state.codes)
        zeros = (state.zero_point.int() - self.zero_offset) & ((1 << bits) - 1)
        zeros = zeros.reshape(outputs, -1).T.to(torch.uint8)
        return {
            "": to_words(state.codes, bits).T.contiguous(),
            "scale": state.scale.reshape(outputs, -1).T.contiguous(),
            "zero_point": to_words(zeros, bits).contiguous(),
        }

    def unpack(self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored) -> State:
        """Return codes, scales and zero points: the inverse of ``pack``."""
        (outputs, inputs), bits = shape, spec.fmt.bits
        zeros = from_words(stored["zero_point"], bits, outputs).T.int() + self.zero_offset
        zeros = zeros & ((1 << bits) - 1)
        codes = from_words(stored[""].T, bits, inputs)
        return State(spec, codes, stored["scale"].T, zeros)

    def value(
        self, spec: QuantizationSpec, shape: tuple[int, ...], stored: Stored, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the values of the codes in ``dtype``."""
        return self.unpack(spec, shape, stored).value(dtype)


class GptqFormat(ForeignFormat):
    """2, 3, 4 or 8-bit weights, read by Transformers with gptqmodel, and by vLLM."""

    name = "gptq"
    holds = (
        "integer weights of 2, 3, 4 or 8 bits per group or per channel, of Linear layers inside of "
        "the model's blocks with multiples of 32 inputs and outputs, inputs in float"
    )
    renamed: ClassVar = {
        "weight": "qweight",
        "weight_scale": "scales",
        "weight_zero_point": "qzeros",
        "weight_groups": "g_idx",
    }
    holds_order = True

    def __init__(self, config: Config, options: JsonExporterConfig) -> None:
        super().__init__(config, options)
        layers = (config.global_quant_config, *config.layer_quant_config.values())
        weights = [layer.weight for layer in layers if layer.weight is not None]
        self.symmetric = all(weight.symmetric is not False for weight in weights)
        self.zero_offset = int(self.symmetric)

    @classmethod
    def of_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format of a checkpoint, by the zero points that it says it has."""
        made = cls(cls.read(section), JsonExporterConfig())
        made.zero_offset = int(section.get("checkpoint_format", CLASSIC) == CLASSIC)
        return made

    @property
    def layout(self) -> Layout:
        """Layout of the tensors."""
        return self.in_any_order(GptqLayout(self.zero_offset))

    def found(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers whose codes are stored, and check what is known to be lost.

        Raises:
            ValueError: Zero points less one are those of no code, or groups of another size.
        """
        layers = super().found(layers, reader)
        if self.symmetric or not self.zero_offset:
            return layers
        bits = next(layer.weight.fmt.bits for layer in layers.values() if layer.weight)
        for key in reader.entries:
            if key.endswith(".qzeros"):
                words = reader.tensor(key)
                zeros = from_words(words, bits, words.shape[-1] * 32 // bits)
                if (zeros == (1 << bits) - 1).any():
                    raise ValueError(
                        f"{key}: zero points less one, as checkpoint_format={CLASSIC!r} stores "
                        "them, have lost 0 here. Convert the checkpoint to gptq_v2 with its tool."
                    )
        return layers

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check the layers, and note which they are where the blocks hold others too."""
        super().admit(layers, left)
        weights = {name: layer.quant_config.weight for name, layer in layers.items()}
        kinds = {n: (w.fmt.bits, group_of(w), w.symmetric is not False) for n, w in weights.items()}
        self.bits, self.group, self.symmetric = self.one_of_all(kinds)
        self.zero_offset = int(self.symmetric)
        apart = any(fnmatch.fnmatchcase(name, IN_BLOCKS) for name in left)
        self.names = list(layers) if apart else None

    def problem(self, name: str, layer: Any) -> str | None:
        """Return why a layer cannot be held, or None."""
        config = layer.quant_config
        problem = weight_only_problem(name, config)
        if problem is None and any(size % 32 for size in shape_of(layer)):
            problem = f"its weight has the shape {shape_of(layer)}"
        return problem or integer_problem(config.weight, BITS)

    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer and the group of each input."""
        inputs = shape_of(layer)[1]
        size = self.group if self.group > 0 else inputs
        groups = torch.arange(inputs, dtype=torch.int32) // size
        return {"g_idx": groups, **super().tensors(layer, scales)}

    def section(self) -> dict[str, Any]:
        """Return what gptqmodel writes."""
        section = {
            "bits": self.bits,
            "checkpoint_format": CLASSIC if self.symmetric else SECOND,
            "desc_act": self.ordered,
            "group_size": self.group,
            "lm_head": False,
            "quant_method": self.name,
            "sym": self.symmetric,
        }
        if self.names is not None:
            section["modules_in_block_to_quantize"] = [self.names]
        return section

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return unsigned integers for the layers named, or those inside of blocks."""
        bits = required(section, "bits", BITS, 4)
        required(section, "desc_act", (True, False), False)  # the stored order tells
        required(section, "checkpoint_format", (CLASSIC, SECOND), CLASSIC)
        symmetric = required(section, "sym", (True, False), True)
        head = required(section, "lm_head", (True, False), False)
        required(section, "dynamic", (None, {}), None)
        weight = unsigned_spec(bits, group_size(section, 128), symmetric)
        layer = QuantizationConfig(weight=weight)
        config = named_config(layer, None)
        key = "modules_in_block_to_quantize"
        groups = section.get(key)
        if groups:
            lists = [group if isinstance(group, list) else [group] for group in groups]
            names = names_in({key: [name for names in lists for name in names]}, key)
            patterns = {f"*{literal(name)}": layer for name in names}
            config = Config(QuantizationConfig(), layer_quant_config=patterns)
        if head:
            config.layer_quant_config["lm_head"] = layer
        return config
