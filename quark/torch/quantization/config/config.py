"""Configuration of a layer and of a model. Every documented name is importable from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import nn

from quark import __version__
from quark.torch.quantization.config.algo import (
    ALGO_CONFIGS,
    AlgoConfig,
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    GPTAQConfig,
    GPTQConfig,
    OnlineRotationConfig,
    PreQuantOptConfig,
    QronosConfig,
    QuaRotConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
    YaqaConfig,
    algo_config_from_dict,
    load_pre_optimization_config_from_file,
    load_quant_algo_config_from_file,
)
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.layer import QLayerConfig, QuantizationConfig
from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.serialize import known, plain
from quark.torch.quantization.config.spec import QTensorConfig, QuantizationSpec, member
from quark.torch.quantization.config.spec_classes import (
    SPEC_CLASSES,
    DataTypeSpec,
    ProgressiveSpec,
    ScaleQuantSpec,
    TwoStageSpec,
)
from quark.torch.quantization.config.type import QuantFlow, QuantizationMode

globals().update(SPEC_CLASSES)

__all__ = [
    *SPEC_CLASSES,
    "ALGO_CONFIGS",
    "AWQConfig",
    "AlgoConfig",
    "AutoRoundConfig",
    "AutoSmoothQuantConfig",
    "Config",
    "DataTypeSpec",
    "GPTAQConfig",
    "GPTQConfig",
    "OnlineRotationConfig",
    "PreQuantOptConfig",
    "QConfig",
    "ProgressiveSpec",
    "QLayerConfig",
    "QTensorConfig",
    "QronosConfig",
    "QuaRotConfig",
    "QuantizationConfig",
    "QuantizationSpec",
    "RotationConfig",
    "SVDQuantConfig",
    "ScaleQuantSpec",
    "SmoothQuantConfig",
    "TwoStageSpec",
    "YaqaConfig",
    "load_pre_optimization_config_from_file",
    "load_quant_algo_config_from_file",
]

_ByName = dict[str, QuantizationConfig]

# Module types that a file may name: nothing else is ever looked up.
LAYER_TYPES: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose2d,
        nn.Embedding,
        nn.EmbeddingBag,
    )
}
# What a global configuration leaves alone: these are quantized where their type or name is given.
NAMED_ONLY = {nn.Conv1d, nn.Conv3d, nn.Embedding, nn.EmbeddingBag}
OLDEST = "0.8"  # the last version whose files do not say which they are of

# Fields that the checkpoint layout has no key for: they act before it is written.
_NOT_WRITTEN = {
    "export",
    "gpu_resident_blocks",
    "keep_prequantized_layers",
    "kv_cache_group",
    "log_severity_level",
    "min_kv_scale",
    "pre_quant_opt_config",
    "quant_flow",
    "shared_scale_groups",
    "sync_moe_expert_input_amax",
}
_FOREIGN_KEYS = {"quant_method"}


@dataclass(eq=True)
class Config:
    """How a model is quantized. ``QConfig`` is the same class.

    A layer takes the first entry of ``layer_quant_config`` whose pattern (as in ``fnmatch``)
    matches its full name, else the entry of its type, else the global one. Names that match
    ``exclude`` are left alone, except that those of the key-value cache keep their outputs.

    Attributes:
        global_quant_config: What applies where nothing else does.
        layer_type_quant_config: Module type to configuration.
        layer_quant_config: Name pattern to configuration, first match first.
        kv_cache_quant_config: Name pattern to configuration of the layers whose outputs make the
            key-value cache.
        softmax_quant_spec: Accepted for compatibility.
        exclude: Patterns of layers that stay as they are.
        algo_config: Options of one algorithm or a list, applied in order.
        pre_quant_opt_config: Transformations before quantization (earlier versions): they precede
            ``algo_config``.
        quant_mode: Accepted for compatibility; modules are always replaced eagerly.
        log_severity_level: Accepted for compatibility.
        version: Version that wrote the configuration.
        kv_cache_group: Patterns of the layers of one attention block that share one scale.
        min_kv_scale: Smallest scale of the key-value cache.
        kv_cache_post_rope: Whether keys of the cache are quantized after rotary embedding, as
            attention takes them, instead of where their projection gives them.
        shared_scale_groups: Groups of name endings, such as ``[["q_proj", "k_proj", "v_proj"]]``,
            that share one range per tensor within each parent module.
        quant_flow: Accepted for compatibility; the model is held in memory.
        gpu_resident_blocks: Accepted for compatibility.
        sync_moe_expert_input_amax: Whether the experts of a layer share the scale of their inputs.
        keep_prequantized_layers: Accepted for compatibility.
        export: Options of the export that a checkpoint was written with.

    Raises:
        TypeError: A field holds something other than the configurations or options it is for.
        ValueError: ``quant_mode`` or ``quant_flow`` is unknown.
    """

    global_quant_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    layer_type_quant_config: dict[type[nn.Module], QuantizationConfig] = field(default_factory=dict)
    layer_quant_config: _ByName = field(default_factory=dict)
    kv_cache_quant_config: _ByName = field(default_factory=dict)
    softmax_quant_spec: QuantizationSpec | None = None
    exclude: list[str] = field(default_factory=list)
    algo_config: list[AlgoConfig] | None = None
    pre_quant_opt_config: list[AlgoConfig] = field(default_factory=list)
    quant_mode: QuantizationMode = QuantizationMode.eager_mode
    log_severity_level: int | None = 1
    version: str | None = __version__
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: float = 0.0
    kv_cache_post_rope: bool = False
    shared_scale_groups: list[list[str]] = field(default_factory=list)
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    export: JsonExporterConfig | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.global_quant_config, QuantizationConfig):
            raise TypeError(
                "global_quant_config: expected a QuantizationConfig, "
                f"got {self.global_quant_config!r}."
            )
        self.exclude = _as_list(self.exclude)
        self.layer_quant_config = dict(self.layer_quant_config or {})
        self.layer_type_quant_config = dict(self.layer_type_quant_config or {})
        self.kv_cache_quant_config = dict(self.kv_cache_quant_config or {})
        self._check_layers()
        mode, flow = QuantizationMode.eager_mode, QuantFlow.standard
        self.quant_mode = member(QuantizationMode, self.quant_mode, "quant_mode") or mode
        self.quant_flow = member(QuantFlow, self.quant_flow, "quant_flow") or flow
        self.kv_cache_group = _as_list(self.kv_cache_group)
        before = _as_list(self.pre_quant_opt_config)
        algorithms = [*before, *_as_list(self.algo_config)]
        for algorithm in algorithms:
            if not isinstance(algorithm, AlgoConfig):
                raise TypeError(f"algo_config: expected options of algorithms, got {algorithm!r}.")
        self.algo_config, self.pre_quant_opt_config = algorithms or None, []

    def _check_layers(self) -> None:
        for name in ("layer_type_quant_config", "layer_quant_config", "kv_cache_quant_config"):
            for key, layer in getattr(self, name).items():
                if not isinstance(layer, QuantizationConfig):
                    raise TypeError(
                        f"{name}[{key!r}]: expected a QuantizationConfig, got {layer!r}."
                    )
        for kind in self.layer_type_quant_config:
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(
                    "layer_type_quant_config: expected module classes such as nn.Linear, "
                    f"got {kind!r}."
                )

    @property
    def kv_cache_patterns(self) -> list[str]:
        """Patterns of the layers of one attention block that share one cache scale."""
        return self.kv_cache_group or list(self.kv_cache_quant_config)

    def to_dict(self, everything: bool = False) -> dict[str, Any]:
        """Return the configuration as plain JSON types, in the layout of ``config.json``.

        Args:
            everything: Whether to keep also the fields that a checkpoint has no key for.
        """
        data: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if everything or f.name not in _NOT_WRITTEN or (f.name == "export" and value):
                data[f.name] = _written(f.name, value)
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """Read a configuration of this or an earlier version (0.8 on).

        Raises:
            ValueError: A key or name is unknown; the nearest known one is named.
        """
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in _FOREIGN_KEYS}
        given = known(data, cls, "quantization_config")
        given = {k: v if v is None else _read(k, v) for k, v in given.items()}
        if given.get("global_quant_config") is None:
            given["global_quant_config"] = QuantizationConfig()
        given.setdefault("version", OLDEST)
        return cls(**given)


QConfig = Config


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _written(name: str, value: Any) -> Any:
    """Return one field as plain JSON types."""
    if value is None:
        return None
    if name in ("global_quant_config", "softmax_quant_spec"):
        return value.to_dict()
    if name == "layer_type_quant_config":
        return {kind.__name__: layer.to_dict() for kind, layer in value.items()}
    if name.endswith("quant_config"):
        return {pattern: layer.to_dict() for pattern, layer in value.items()}
    if name in ("algo_config", "pre_quant_opt_config"):
        return [asdict(algorithm) for algorithm in value]
    return asdict(value) if name == "export" else plain(value)


def _read(name: str, value: Any) -> Any:
    """Return one field from plain JSON types."""
    if name == "global_quant_config":
        return QuantizationConfig.from_dict(value)
    if name == "softmax_quant_spec":
        return QuantizationSpec.from_dict(value)
    if name.endswith("quant_config"):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object of layer configurations, got {value!r}.")
        layers = {key: QuantizationConfig.from_dict(layer) for key, layer in value.items()}
        if name == "layer_type_quant_config":
            return {LAYER_TYPES[one_of(k, LAYER_TYPES, name)]: v for k, v in layers.items()}
        return layers
    if name in ("algo_config", "pre_quant_opt_config"):
        return [
            a if isinstance(a, AlgoConfig) else algo_config_from_dict(a) for a in _as_list(value)
        ]
    if name == "export":
        return JsonExporterConfig(**known(value, JsonExporterConfig, "quantization_config.export"))
    return value
