"""Options of an export. They are stored in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from quark.torch.quantization.config.bounds import NonNegative
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.value_types import check_options

WEIGHT_FORMATS = ("real_quantized", "fake_quantized")
PACK_METHODS = ("reorder", "order")
ONNX_FILE = "quark_model.onnx"  # name of a graph in its directory


@dataclass
class JsonExporterConfig:
    """Options of a safetensors or native export.

    Attributes:
        weight_merge_groups: Groups of name patterns (or endings) of layers that share one
            per-tensor weight scale within each parent module, such as
            ``[["*q_proj", "*k_proj", "*v_proj"]]``.
        kv_cache_group: Name patterns of the layers whose outputs make the key-value cache.
        min_kv_scale: Lower bound of the scales of the key-value cache.
        weight_format: ``real_quantized`` for packed codes, ``fake_quantized`` for dequantized
            float weights.
        pack_method: Order of 4-bit codes in a 32-bit word: ``reorder`` (interleaved) or ``order``.

    Raises:
        TypeError: An option has a value of another type.
        ValueError: ``min_kv_scale`` is negative or not finite, or ``weight_format`` or
            ``pack_method`` is unknown.
    """

    weight_merge_groups: list[list[str]] | None = None
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: NonNegative = 0.0
    weight_format: str = "real_quantized"
    pack_method: str = "reorder"

    def __post_init__(self) -> None:
        self.kv_cache_group = [] if self.kv_cache_group is None else self.kv_cache_group
        check_options(self)
        self.kv_cache_group = list(self.kv_cache_group)
        self.weight_format = one_of(self.weight_format, WEIGHT_FORMATS, "weight_format")
        self.pack_method = one_of(self.pack_method, PACK_METHODS, "pack_method")


@dataclass
class OnnxExporterConfig:
    """Options of an ONNX export. There are none."""


@dataclass
class ExporterConfig:
    """Options of ``ModelExporter``.

    Attributes:
        json_export_config: Options of safetensors and native exports.
        onnx_export_config: Options of ONNX exports.

    Raises:
        TypeError: An option has a value of another type.
    """

    json_export_config: JsonExporterConfig = field(default_factory=JsonExporterConfig)
    onnx_export_config: OnnxExporterConfig | None = None

    def __post_init__(self) -> None:
        check_options(self)
