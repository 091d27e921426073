"""Configuration of a model. Every documented name of configurations is importable from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from quark import __version__
from quark.torch.quantization.config.algo import ALGO_CONFIGS as ALGO_CONFIGS
from quark.torch.quantization.config.algo import AlgoConfig as AlgoConfig
from quark.torch.quantization.config.algo import AutoRoundConfig as AutoRoundConfig
from quark.torch.quantization.config.algo import AutoSmoothQuantConfig as AutoSmoothQuantConfig
from quark.torch.quantization.config.algo import AWQConfig as AWQConfig
from quark.torch.quantization.config.algo import BiasCorrectionConfig as BiasCorrectionConfig
from quark.torch.quantization.config.algo import (
    BlockwiseJointTuningConfig as BlockwiseJointTuningConfig,
)
from quark.torch.quantization.config.algo import CLEConfig as CLEConfig
from quark.torch.quantization.config.algo import GPTAQConfig as GPTAQConfig
from quark.torch.quantization.config.algo import GPTQConfig as GPTQConfig
from quark.torch.quantization.config.algo import OnlineRotationConfig as OnlineRotationConfig
from quark.torch.quantization.config.algo import PreQuantOptConfig as PreQuantOptConfig
from quark.torch.quantization.config.algo import PruningConfig as PruningConfig
from quark.torch.quantization.config.algo import QronosConfig as QronosConfig
from quark.torch.quantization.config.algo import QuaRotConfig as QuaRotConfig
from quark.torch.quantization.config.algo import RotationConfig as RotationConfig
from quark.torch.quantization.config.algo import SmoothQuantConfig as SmoothQuantConfig
from quark.torch.quantization.config.algo import SparseGPTConfig as SparseGPTConfig
from quark.torch.quantization.config.algo import SVDQuantConfig as SVDQuantConfig
from quark.torch.quantization.config.algo import WandaConfig as WandaConfig
from quark.torch.quantization.config.algo import YaqaConfig as YaqaConfig
from quark.torch.quantization.config.algo_lookup import algo_config_from_dict
from quark.torch.quantization.config.algo_lookup import (
    load_pre_optimization_config_from_file as load_pre_optimization_config_from_file,
)
from quark.torch.quantization.config.algo_lookup import (
    load_quant_algo_config_from_file as load_quant_algo_config_from_file,
)
from quark.torch.quantization.config.bounds import Natural, NonNegative
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.graph import PassOptions as PassOptions
from quark.torch.quantization.config.graph import ShiftLimits as ShiftLimits
from quark.torch.quantization.config.layer import QLayerConfig as QLayerConfig
from quark.torch.quantization.config.layer import QuantizationConfig as QuantizationConfig
from quark.torch.quantization.config.name_lookup import member, one_of
from quark.torch.quantization.config.part_kinds import check_parts
from quark.torch.quantization.config.qat import QATSpec as QATSpec
from quark.torch.quantization.config.qat import TQTSpec as TQTSpec
from quark.torch.quantization.config.serialize import known, path_of, plain
from quark.torch.quantization.config.spec import QTensorConfig as QTensorConfig
from quark.torch.quantization.config.spec import QuantizationSpec as QuantizationSpec
from quark.torch.quantization.config.spec_bases import DataTypeSpec as DataTypeSpec
from quark.torch.quantization.config.spec_bases import ProgressiveSpec as ProgressiveSpec
from quark.torch.quantization.config.spec_bases import ScaleQuantSpec as ScaleQuantSpec
from quark.torch.quantization.config.spec_bases import TwoStageSpec as TwoStageSpec
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES as SPEC_CLASSES
from quark.torch.quantization.config.type import QuantFlow, QuantizationMode
from quark.torch.quantization.config.value_types import check_fields, check_options, check_types

if TYPE_CHECKING:
    from torch.nn import Module

    from quark.torch.quantization.config.spec_classes import *  # noqa: F403
else:
    Module = Any  # annotations are read where no torch is imported
    # Type checkers read the names above instead: they understand no names that are computed.
    globals().update(SPEC_CLASSES)

    __all__ = [
        *SPEC_CLASSES,
        "ALGO_CONFIGS",
        "AWQConfig",
        "BiasCorrectionConfig",
        "CLEConfig",
        "AlgoConfig",
        "AutoRoundConfig",
        "AutoSmoothQuantConfig",
        "BlockwiseJointTuningConfig",
        "Config",
        "DataTypeSpec",
        "GPTAQConfig",
        "GPTQConfig",
        "OnlineRotationConfig",
        "PassOptions",
        "PreQuantOptConfig",
        "PruningConfig",
        "QATSpec",
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
        "ShiftLimits",
        "SmoothQuantConfig",
        "SparseGPTConfig",
        "TQTSpec",
        "TwoStageSpec",
        "WandaConfig",
        "YaqaConfig",
        "load_pre_optimization_config_from_file",
        "load_quant_algo_config_from_file",
    ]

_ByName = dict[str, QuantizationConfig]

OLDEST = "0.8"  # the last version whose files have no version

# Fields without a key in config.json: they act before a checkpoint is written.
_NOT_WRITTEN = {
    "export",
    "float_parts",
    "gpu_resident_blocks",
    "keep_prequantized_layers",
    "kv_cache_group",
    "log_severity_level",
    "min_kv_scale",
    "moe_calibrate_all_experts",
    "pass_options",
    "pre_quant_opt_config",
    "quant_flow",
    "query_quant_config",
    "shared_scale_groups",
    "shift_limits",
    "sync_moe_expert_input_amax",
}
# Written if they are set, though they are in _NOT_WRITTEN.
_WRITTEN_IF_SET = {"export", "pass_options", "query_quant_config", "shift_limits"}
# Fields that hold a dataclass of plain values.
_OBJECTS: dict[str, type[Any]] = {
    "export": JsonExporterConfig,
    "pass_options": PassOptions,
    "shift_limits": ShiftLimits,
}
_FOREIGN_KEYS = {"quant_method"}
_READ = (  # fields that have readers of their own, which check them
    "global_quant_config",
    "layer_type_quant_config",
    "layer_quant_config",
    "kv_cache_quant_config",
    "query_quant_config",
    "softmax_quant_spec",
    "algo_config",
    "pre_quant_opt_config",
    *_OBJECTS,
)
_BY_NAME = ("layer_quant_config", "kv_cache_quant_config", "query_quant_config")
_LISTS = (
    "exclude",
    "algo_config",
    "pre_quant_opt_config",
    "float_parts",
    "kv_cache_group",
    "shared_scale_groups",
)


@dataclass(eq=True)
class Config:
    """Quantization of a model. ``QConfig`` is the same class.

    A layer takes the first entry of ``layer_quant_config`` whose pattern (as in ``fnmatch``)
    matches its full name, else the entry of its type, else the global one. Layers that match
    ``exclude`` stay in float, except for their outputs if these make the key-value cache or are
    queries.

    Attributes:
        global_quant_config: Configuration of layers that no other entry selects.
        layer_type_quant_config: Module type to configuration.
        layer_quant_config: Name pattern to configuration; the first match counts.
        kv_cache_quant_config: Name pattern to configuration of the layers whose outputs make the
            key-value cache.
        softmax_quant_spec: Specification of the probabilities of attention; None leaves them in
            float. They are quantized in attention modules with a quantized layer.
        exclude: Name patterns of layers that stay in float. ``lm_head`` stands for the output head
            of the model, whatever its name.
        algo_config: Options of one algorithm or a list, applied in order.
        pre_quant_opt_config: Options of earlier versions; they are put before ``algo_config``.
        quant_mode: ``eager_mode`` to quantize a model, ``fx_graph_mode`` to quantize its graph of
            ``torch.export``.
        log_severity_level: Level of the log on the terminal: 0 debug, 1 info, 2 warning.
        version: Version that wrote the configuration.
        kv_cache_group: Name patterns of the layers of one attention block that share a cache scale.
        min_kv_scale: Lower bound of the scales of the key-value cache.
        kv_cache_post_rope: Whether cached keys are quantized after the rotary embedding, instead
            of at the output of their projection.
        shared_scale_groups: Groups of name endings that share per-tensor scales within each parent
            module. ``[["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]`` stands for all
            layers that share an input, whatever their names.
        quant_flow: Must be ``standard`` to quantize a model.
        gpu_resident_blocks: No effect: the whole model is held in memory.
        sync_moe_expert_input_amax: Whether the experts of a layer share the scale of their inputs.
        moe_calibrate_all_experts: Whether calibration observes the inputs of each expert for all
            tokens, instead of those that the router sends to it.
        keep_prequantized_layers: Whether layers that stay in float take the codes and scales that a
            quantized source has of them, when the model is frozen.
        export: Options of the export that wrote the checkpoint.
        float_parts: Kinds of parts that stay in float, found by the structure of the model when
            it is quantized: ``tower`` (vision and audio), ``projector`` and ``router``.
        pass_options: Graph mode: rewrites of the graph that are applied only if asked for.
        shift_limits: Graph mode: limits of the shifts of an integer-only device. Scales, which are
            powers of two then, are changed to keep them.
        query_quant_config: Name pattern to configuration of the layers whose outputs are the
            queries of attention. They are quantized after the rotary embedding.

    Raises:
        TypeError: A field holds a value of another type.
        ValueError: ``quant_mode``, ``quant_flow`` or a kind of ``float_parts`` is unknown, or a
            number is outside of its range.
    """

    global_quant_config: QuantizationConfig = field(default_factory=QuantizationConfig)
    layer_type_quant_config: dict[type[Module], QuantizationConfig] = field(default_factory=dict)
    layer_quant_config: _ByName = field(default_factory=dict)
    kv_cache_quant_config: _ByName = field(default_factory=dict)
    softmax_quant_spec: QuantizationSpec | None = None
    exclude: list[str] = field(default_factory=list)
    algo_config: list[AlgoConfig] | None = None
    pre_quant_opt_config: list[AlgoConfig] = field(default_factory=list)
    quant_mode: QuantizationMode = QuantizationMode.eager_mode
    log_severity_level: Natural | None = 1
    version: str | None = __version__
    kv_cache_group: list[str] = field(default_factory=list)
    min_kv_scale: NonNegative = 0.0
    kv_cache_post_rope: bool = False
    shared_scale_groups: list[list[str]] = field(default_factory=list)
    quant_flow: QuantFlow = QuantFlow.standard
    gpu_resident_blocks: int = 0
    sync_moe_expert_input_amax: bool = False
    keep_prequantized_layers: bool = True
    moe_calibrate_all_experts: bool = False
    export: JsonExporterConfig | None = None
    float_parts: list[str] = field(default_factory=list)
    pass_options: PassOptions | None = None
    shift_limits: ShiftLimits | None = None
    query_quant_config: _ByName = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layer_type_quant_config", *_BY_NAME):
            given = getattr(self, name)
            check_types(Mapping | None, **{f"Config.{name}": given})
            setattr(self, name, dict(given or {}))
        self._check_layer_types()
        for name in _LISTS:
            setattr(self, name, _as_list(getattr(self, name)))
        mode, flow = QuantizationMode.eager_mode, QuantFlow.standard
        self.quant_mode = member(QuantizationMode, self.quant_mode, "quant_mode") or mode
        self.quant_flow = member(QuantFlow, self.quant_flow, "quant_flow") or flow
        check_options(self)
        self.float_parts = check_parts(self.float_parts)
        algorithms = [*self.pre_quant_opt_config, *(self.algo_config or [])]
        self.algo_config, self.pre_quant_opt_config = algorithms or None, []

    def _check_layer_types(self) -> None:
        for kind in self.layer_type_quant_config:
            from torch import nn

            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(
                    "layer_type_quant_config: expected module classes such as nn.Linear, "
                    f"got {kind!r}."
                )

    @property
    def kv_cache_patterns(self) -> list[str]:
        """Name patterns of the layers of one attention block that share a cache scale."""
        return self.kv_cache_group or list(self.kv_cache_quant_config)

    def get_rotation_config(self) -> RotationConfig | None:
        """Return the options of the first rotation of ``algo_config``; None if there is none."""
        options = self.algo_config or []
        return next((o for o in options if isinstance(o, RotationConfig)), None)

    @staticmethod
    def with_llm_template(template: Any, scheme: str, *args: Any, **options: Any) -> Config:
        """Return ``template.get_config(scheme, …)``, the configuration of an ``LLMTemplate``."""
        config: Config = template.get_config(scheme, *args, **options)
        return config

    def to_dict(self, everything: bool = False) -> dict[str, Any]:
        """Return the configuration as plain JSON types, in the layout of ``config.json``.

        Args:
            everything: Whether to include the fields without a key in config.json, such as
                ``float_parts`` and ``shared_scale_groups``. Without them, ``from_dict`` returns
                another configuration if they are set.
        """
        data: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            is_set = value not in (None, {}) and f.name in _WRITTEN_IF_SET
            if everything or f.name not in _NOT_WRITTEN or is_set:
                data[f.name] = _written(f.name, value)
        return dict(sorted(data.items()))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Config:
        """Read a configuration of this or an earlier version (0.8 on).

        Raises:
            ValueError: A key or name is unknown; the message names the nearest.
        """
        if isinstance(data, dict):
            data = {key: value for key, value in data.items() if key not in _FOREIGN_KEYS}
        given = known(data, cls, "quantization_config")
        given = {k: _as_list(v) if k in _LISTS else v for k, v in given.items()}
        nullable = {f.name for f in fields(cls) if str(f.type).endswith("None")}
        given = {k: v for k, v in given.items() if v is not None or k in nullable}
        plain_types = {k: v for k, v in given.items() if v is not None and k not in _READ}
        check_fields(plain_types, cls)
        given = {k: v if v is None else _read(k, v) for k, v in given.items()}
        if given.get("global_quant_config") is None:
            given["global_quant_config"] = QuantizationConfig()
        given.setdefault("version", OLDEST)
        with path_of("quantization_config"):
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
    return asdict(value) if name in _OBJECTS else plain(value)


def _read(name: str, value: Any) -> Any:
    """Return one field from plain JSON types."""
    if name in ("global_quant_config", "softmax_quant_spec"):
        cls: Any = QuantizationConfig if name == "global_quant_config" else QuantizationSpec
        with path_of(name):
            return cls.from_dict(value)
    if name.endswith("quant_config"):
        if not isinstance(value, dict):
            raise ValueError(f"{name}: expected an object of layer configurations, got {value!r}.")
        layers = {}
        for key, layer in value.items():
            with path_of(f"{name}.{key}"):
                layers[key] = QuantizationConfig.from_dict(layer)
        if name == "layer_type_quant_config" and layers:
            from quark.torch.quantization.config.layer_types import LAYER_TYPES

            return {LAYER_TYPES[one_of(k, LAYER_TYPES, name)]: v for k, v in layers.items()}
        return layers
    if name in ("algo_config", "pre_quant_opt_config"):
        return [_read_algorithm(part, f"{name}[{i}]") for i, part in enumerate(_as_list(value))]
    if name in _OBJECTS:
        cls = _OBJECTS[name]
        given = known(value, cls, f"quantization_config.{name}")
        check_fields(given, cls, name)
        with path_of(name):
            return cls(**given)
    return value


def _read_algorithm(value: Any, path: str) -> AlgoConfig:
    with path_of(path):
        return value if isinstance(value, AlgoConfig) else algo_config_from_dict(value)
