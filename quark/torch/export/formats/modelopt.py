"""The format of ModelOpt: ``quant_method`` "modelopt", for vLLM, SGLang and TensorRT-LLM.

``quant_algo`` is the scheme of all layers, or MIXED_PRECISION: then ``quantized_layers`` maps names
of layers to their schemes. Per layer of N outputs and K inputs::

    FP8           weight float8_e4m3fn [N, K]   weight_scale []   input_scale []
    NVFP4         weight uint8 [N, K/2]         weight_scale float8_e4m3fn [N, K/16]
                  weight_scale_2 []             input_scale []: tensor scales
    W4A16_NVFP4   as NVFP4, without input_scale
    MXFP8         weight float8_e4m3fn [N, K]   weight_scale uint8 [N, K/32], exponents

An fp8 key-value cache adds ``k_proj.k_scale`` and ``v_proj.v_scale`` []. The settings are in
``config.json``, and in ``hf_quant_config.json`` under other names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quark import __version__
from quark.torch.export.formats.config_section import read_choice, read_names
from quark.torch.export.formats.kv_cache import SCALE_NAMES, STATIC_FP8, kv_cache_config
from quark.torch.export.formats.layer_checks import check_name_parts
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import config_for, literal
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec

if TYPE_CHECKING:
    import torch

    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


# quant_algo -> the same scheme here.
ALGORITHMS = {
    "FP8": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4_weight_only",
    "MXFP8": "mxfp8",
}
MIXED = "MIXED_PRECISION"
_CACHE_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


class _Grid(NamedTuple):
    """What a checkpoint stores of a specification, and how inputs are rounded by it."""

    fmt: Any
    qscheme: QSchemeType
    group: int
    scale: Any
    is_dynamic: bool


class ModelOptFormat(ThirdPartyFormat):
    """Weights and inputs in fp8, MXFP8 or NVFP4, one scheme for all layers or one for each."""

    name = "modelopt"
    transformers_packages = None
    supported = (
        "Linear layers with fp8_e4m3 weights and static inputs per tensor (fp8), in NVFP4 (nvfp4, "
        "nvfp4_weight_only) or in MXFP8 (mxfp8)"
    )
    supports_kv_cache = True
    algorithms: Mapping[str, str] = {}  # of each layer

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.packed import PackedLayout

        return PackedLayout(self.options.pack_method)

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and that names of float layers are safe.

        Raises:
            ValueError: The format cannot hold a layer, or its section cannot exclude one.
        """
        super().check_writable(layers, float_layers)
        self.algorithms = {n: str(_algorithm(layer.quant_config)) for n, layer in layers.items()}
        check_name_parts(self.name, layers, float_layers)

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        config = layer.quant_config
        if _algorithm(config) is not None:
            return None
        weight, inputs = config.weight, config.input_tensors
        kinds = (("weight", weight), ("input", inputs))
        described = [
            f"its {tensor} is {spec.dtype.name} {spec.scheme.qscheme.name}"
            for tensor, spec in kinds
            if spec is not None
        ]
        return " and ".join(described)

    def layer_tensors(
        self, layer: QuantizedLayer, scales: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer; the tensor scale of inputs is ``input_scale``."""
        tensors = super().layer_tensors(layer, scales)
        if "input_scale_2" in tensors:
            tensors["input_scale"] = tensors.pop("input_scale_2")
        return tensors

    def stored_name(self, key: str) -> str:
        """Return the full name in the checkpoint; scales of a cache belong to the projections."""
        path, _, last = key.rpartition(".")
        projection = path.rpartition(".")[2]
        if last == "output_scale" and projection in SCALE_NAMES:
            return f"{path}.{SCALE_NAMES[projection]}"
        return key

    def state_name(self, key: str) -> str:
        """Return the name in the model's state of the tensor stored as ``key``."""
        path, _, last = key.rpartition(".")
        projection = path.rpartition(".")[2]
        if SCALE_NAMES.get(projection) == last:
            return f"{path}.output_quantizer.scale"
        layer = config_for(path, None, self.config) if last == "input_scale" else None
        inputs = None if layer is None else layer.input_tensors
        if inputs is not None and inputs.second_stage is not None:
            return f"{path}.input_scale_2"
        return super().state_name(key)

    def config_section(self) -> dict[str, Any]:
        """Return the section that vLLM and SGLang read."""
        used = [name for name in ALGORITHMS if name in self.algorithms.values()]
        is_mixed = len(used) > 1
        groups = {
            f"group_{i}": {**_group(algorithm), "targets": ["Linear"]}
            for i, algorithm in enumerate(used)
        }
        if is_mixed:
            for group, algorithm in zip(groups.values(), used, strict=True):
                group["targets"] = sorted(n for n, a in self.algorithms.items() if a == algorithm)
        layers = {name: _layer_entry(algorithm) for name, algorithm in self.algorithms.items()}
        return {
            "config_groups": groups,
            "ignore": list(self.float_layers),
            "kv_cache_scheme": dict(_CACHE_SCHEME) if self.has_kv_cache else None,
            "producer": {"name": "quark", "version": __version__},
            "quant_algo": MIXED if is_mixed else used[0],
            "quant_method": self.name,
            **({"quantized_layers": layers} if is_mixed else {}),
        }

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return the scheme of all layers but those excluded, or of each layer that is listed.

        Raises:
            ValueError: A scheme or a setting is not supported.
        """
        is_mixed = section.get("quant_algo") == MIXED
        default = QuantizationConfig() if is_mixed else _read_scheme(section, section)
        layers = _read_layers(section) if is_mixed else {}
        cache = section.get("kv_cache_scheme")
        if cache is not None and cache != _CACHE_SCHEME:
            raise ValueError(
                f"quant_method={cls.name!r}: kv_cache_scheme={cache!r} is not supported, only "
                f"{_CACHE_SCHEME} and null."
            )
        return Config(
            default,
            exclude=read_names(section, "ignore"),
            layer_quant_config=layers,
            kv_cache_quant_config=kv_cache_config(STATIC_FP8 if cache else None),
        )


def _read_layers(section: Mapping[str, Any]) -> dict[str, QuantizationConfig]:
    """Return the schemes of ``quantized_layers`` by patterns of names.

    Raises:
        ValueError: It is no mapping of names to schemes, or a scheme is not supported.
    """
    layers = section.get("quantized_layers")
    is_sound = isinstance(layers, dict) and all(isinstance(v, dict) for v in layers.values())
    if not layers or not is_sound:
        raise ValueError(
            f"quant_method='modelopt': quant_algo={MIXED!r} needs quantized_layers, a mapping of "
            f"names of layers to their quant_algo, got {layers!r}."
        )
    return {literal(name): _read_scheme(entry, section) for name, entry in layers.items()}


def _read_scheme(entry: Mapping[str, Any], section: Mapping[str, Any]) -> QuantizationConfig:
    """Return the scheme of an object with ``quant_algo`` and ``group_size``.

    Raises:
        ValueError: It is not supported.
    """
    described = {"quant_method": section.get("quant_method"), **entry}
    layer = scheme(ALGORITHMS[read_choice(described, "quant_algo", tuple(ALGORITHMS), None)])
    assert layer.weight is not None
    if layer.weight.scheme.qscheme is QSchemeType.per_group:
        read_choice(described, "group_size", (None, layer.weight.scheme.group), None)
    return layer


def _layer_entry(algorithm: str) -> dict[str, Any]:
    """Return the entry of a layer in ``quantized_layers``."""
    size = _group(algorithm)["weights"].get("group_size")
    return {"quant_algo": algorithm} | ({"group_size": size} if size else {})


def _group(algorithm: str) -> dict[str, Any]:
    """Return the descriptions of weight and input in ``config_groups``."""
    layer = scheme(ALGORITHMS[algorithm])
    specs = {"weights": layer.weight, "input_activations": layer.input_tensors}
    return {key: _args(spec) for key, spec in specs.items() if spec is not None}


def _algorithm(config: QuantizationConfig) -> str | None:
    """Return ``quant_algo`` of a layer, None if there is none."""
    for algorithm, name in ALGORITHMS.items():
        known = scheme(name)
        if _grids(config.weight, False) == _grids(known.weight, False) and _grids(
            config.input_tensors, True
        ) == _grids(known.input_tensors, True):
            return algorithm
    return None


def _grids(spec: QuantizationSpec | None, is_input: bool) -> list[_Grid]:
    """Return the grid of each stage of a specification, [] for None."""
    if spec is None:
        return []
    schemes = [(stage.scheme, stage) for stage in spec.stages]
    return [
        _Grid(s.fmt, s.qscheme, s.group, s.scale, is_input and bool(stage.is_dynamic))
        for s, stage in schemes
    ]


def _args(spec: QuantizationSpec) -> dict[str, Any]:
    """Return the description of a tensor in ``config_groups``."""
    args: dict[str, Any] = {"dynamic": False, "num_bits": spec.fmt.bits, "type": "float"}
    grouped = spec.scheme.qscheme is QSchemeType.per_group
    return args | ({"group_size": spec.scheme.group} if grouped else {})
