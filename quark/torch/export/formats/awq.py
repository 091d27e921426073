"""The format of AutoAWQ: ``quant_method`` "awq".

Per layer of N outputs and K inputs in groups of g: ``qweight`` int32 [K, N/8] and ``qzeros`` int32
[K/g, N/8], eight unsigned 4-bit codes per word in interleaved order (``layouts/awq.py``);
``scales`` [K/g, N] in the ``scale_type`` of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.base import ExportFormat
from quark.torch.export.formats.config_section import (
    config_for_blocks,
    config_without,
    read_choice,
    read_group_size,
    read_names,
    unsigned_weight_spec,
    with_all_weight_fields,
    with_weight_fields,
)
from quark.torch.export.formats.layer_checks import (
    check_name_parts,
    integer_weight_problem,
    weight_group_size,
    weight_only_problem,
    weight_shape,
    weight_spec,
)
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import PACK_METHODS, JsonExporterConfig
from quark.torch.quantization.config.type import Dtype

if TYPE_CHECKING:
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


class AwqFormat(ThirdPartyFormat):
    """4-bit weights per group, read by Transformers with gptqmodel, AutoAWQ and vLLM."""

    name = "awq"
    transformers_packages: ClassVar = {"gptqmodel": "gptqmodel"}
    supported = (
        "uint4 or int4 weights per group of a positive group_size, of Linear layers inside of the "
        "model's blocks with a multiple of 8 outputs, inputs in float"
    )
    tensor_names: ClassVar = {
        "weight": "qweight",
        "weight_scale": "scales",
        "weight_zero_point": "qzeros",
    }
    group_size: int
    expects_middle_zeros = False

    @classmethod
    def from_section(cls, section: dict[str, Any]) -> ExportFormat:
        """Return the format of a checkpoint; auto-round stores 8 where there is no zero point."""
        fmt = super().from_section(section)
        assert isinstance(fmt, cls)
        fmt.expects_middle_zeros = section.get("zero_point") is False and "export" not in section
        return fmt

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.awq import AwqLayout

        return AwqLayout(self.options.pack_method)

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and that no float layer's name is part of a quantized layer's name.

        Raises:
            ValueError: The format cannot hold a layer, or its section cannot exclude one.
        """
        super().check_writable(layers, float_layers)
        self.group_size = self.common_scheme(
            {name: weight_group_size(weight_spec(layer)) for name, layer in layers.items()}
        )
        check_name_parts(self.name, layers, float_layers)

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        weight = weight_spec(layer)
        problem = weight_only_problem(name, layer.quant_config)
        problem = problem or integer_weight_problem(weight, (4,))
        if problem is None and weight_group_size(weight) <= 0:
            problem = "its weight has no groups"
        if problem is None and weight_shape(layer)[0] % 8:
            problem = f"it has {weight_shape(layer)[0]} outputs"
        return problem

    def config_section(self) -> dict[str, Any]:
        """Return the section as AutoAWQ writes it; zero points are stored for any scheme."""
        return {
            "bits": 4,
            "group_size": self.group_size,
            "modules_to_not_convert": list(self.float_layers),
            "quant_method": self.name,
            "version": "gemm",
            "zero_point": True,
        }

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers stored in codes, symmetric if all zero points are the middle code.

        Raises:
            ValueError: A zero point is another code although ``zero_point`` is false.
        """
        from quark.torch.export.formats.layouts.awq import MIDDLE_ZEROS

        layers = super().stored_layers(layers, reader)
        zeros = {key: reader.tensor(key) for key in reader.entries if key.endswith(".qzeros")}
        offset = next((key for key in zeros if not (zeros[key] == MIDDLE_ZEROS).all()), None)
        if offset is not None and self.expects_middle_zeros:
            raise ValueError(
                f"{offset}: a zero point is not 8, the only one for zero_point=False. Set "
                "zero_point to true in config.json if the weights are asymmetric."
            )
        if offset is not None:
            return layers
        self.config = with_all_weight_fields(self.config, symmetric=True)
        return {name: with_weight_fields(layer, symmetric=True) for name, layer in layers.items()}

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return uint4 per group, for all layers but those excluded or for those of the blocks."""
        read_choice(section, "bits", (4,), 4)
        read_choice(section, "version", ("gemm", "GEMM"), "gemm")
        weight = unsigned_weight_spec(4, read_group_size(section, 128), symmetric=False)
        # AMD Quark, which adds "export", stores signed codes where there are no zero points.
        if not read_choice(section, "zero_point", (True, False), True) and "export" in section:
            weight = weight.changed(dtype=Dtype.int4, symmetric=True)
        layer = QuantizationConfig(weight=weight)
        excluded = read_names(section, "modules_to_not_convert")
        config = config_without(layer, excluded) if excluded else config_for_blocks(layer)
        order = read_choice(section, "pack_method", PACK_METHODS, "reorder")
        return replace(config, export=JsonExporterConfig(pack_method=order))
