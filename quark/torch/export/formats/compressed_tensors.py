"""The checkpoints of compressed-tensors: ``quant_method`` "compressed-tensors".

Each group of layers has a format. ``pack-quantized``: ``weight_packed`` int32, ``weight_scale``,
``weight_zero_point`` and ``weight_shape``; ``int-quantized`` and ``float-quantized``: ``weight``
int8 or float8; ``mxfp4-pack-quantized`` and ``nvfp4-pack-quantized``: ``weight_packed`` uint8. The
scale of scales of NVFP4 is stored as what scales are multiplied by: its reciprocal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from quark.torch.export.formats.compressed_tensors_args import arguments, format_name, specification
from quark.torch.export.formats.config_section import names_in
from quark.torch.export.formats.layouts.compressed_tensors import CompressedLayout
from quark.torch.export.formats.third_party import FP8, ForeignFormat, is_static_fp8, shape_of
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.export import JsonExporterConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.nn.packed import Layout

PACK, INT, MIXED = "pack-quantized", "int-quantized", "mixed-precision"


class CompressedTensorsFormat(ForeignFormat):
    """Integer, fp8, MXFP4 and NVFP4 checkpoints for vLLM and Transformers."""

    name = "compressed-tensors"
    holds = (
        "Linear layers with integer weights per channel or per group of inputs (inputs in float or "
        "int8), int8 weights and inputs (symmetric weights per tensor or per channel), fp8_e4m3 "
        "weights (inputs in float or fp8_e4m3), MXFP4 and NVFP4"
    )
    renamed: ClassVar = {
        "weight_scale_2": "weight_global_scale",
        "input_scale_2": "input_global_scale",
        "weight_groups": "weight_g_idx",
    }
    unneeded = ("weight_shape",)
    has_cache = True

    def __init__(self, config: Config, options: JsonExporterConfig) -> None:
        super().__init__(config, options)
        layers = (config.global_quant_config, *config.layer_quant_config.values())
        self.packed_layout = CompressedLayout(all(format_name(c) != INT for c in layers))

    @property
    def layout(self) -> Layout:
        """Layout of the tensors."""
        return self.in_any_order(self.packed_layout)

    def admit(self, layers: Mapping[str, Any], left: Sequence[str]) -> None:
        """Check the layers and put those that are quantized alike together."""
        super().admit(layers, left)
        self.groups: list[tuple[dict[str, Any], list[str]]] = []
        for name, layer in layers.items():
            scheme = _scheme(layer.quant_config)
            names = next((n for known, n in self.groups if known == scheme), None)
            if names is None:
                self.groups.append((scheme, [name]))
            else:
                names.append(name)
        self.packed_layout = CompressedLayout(all(s["format"] != INT for s, _ in self.groups))
        wide = [s for s, _ in self.groups if s["weights"]["num_bits"] == 8]
        if {PACK, INT} <= {s["format"] for s in wide}:
            raise ValueError(
                "custom_mode='compressed-tensors' cannot hold int8 weights with and without "
                "quantized inputs in one checkpoint: exclude some, or use custom_mode='quark'."
            )

    def problem(self, name: str, layer: Any) -> str | None:
        """Return why a layer cannot be held, or None."""
        config = layer.quant_config
        found = format_name(config)
        if found is None:
            parts = {"weight": config.weight, "input": config.input_tensors}
            return " and ".join(
                f"its {what} is {spec.dtype.name} {spec.scheme.qscheme.name}"
                for what, spec in parts.items()
                if spec is not None
            )
        group = config.weight.scheme.group
        if found == PACK and group > 0 and shape_of(layer)[1] % group:
            return f"its {shape_of(layer)[1]} inputs are no multiple of {group}"
        return None

    def tensors(self, layer: nn.Module, scales: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer, packed weights with their shape."""
        found = super().tensors(layer, scales)
        for name, tensor in found.items():
            if name.endswith("_global_scale"):
                found[name] = tensor.reciprocal()
        form = format_name(layer.quant_config)  # type: ignore[arg-type]
        if form is not None and "pack" in form:
            found["weight_packed"] = found.pop("weight")
        if form == PACK:
            found["weight_shape"] = torch.tensor(shape_of(layer))
        return found

    def state_name(self, key: str) -> str:
        """Return the name in the state of the model."""
        return super().state_name(re.sub(r"\.weight_packed$", ".weight", key))

    def taken(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return scales of scales instead of their reciprocals."""
        return tensor.reciprocal() if key.endswith("_global_scale") else tensor

    def section(self) -> dict[str, Any]:
        """Return what compressed-tensors reads."""
        formats = {scheme["format"] for scheme, _ in self.groups}
        alone = len(self.groups) == 1
        groups = {
            f"group_{i}": {**scheme, "targets": ["Linear"] if alone else names}
            for i, (scheme, names) in enumerate(self.groups)
        }
        return {
            "config_groups": groups,
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "ignore": list(self.left),
            "kv_cache_scheme": arguments(FP8, is_input=True) if self.cache else None,
            "quant_method": self.name,
            "quantization_status": "compressed",
        }

    @classmethod
    def read(cls, section: dict[str, Any]) -> Config:
        """Return the configuration that the groups stand for.

        Raises:
            ValueError: They are malformed, or say what is not read here.
        """
        _check_dense(section)
        whole = QuantizationConfig()
        layers: dict[str, QuantizationConfig] = {}
        for group in _groups(section):
            form = group.get("format") or section.get("format")
            layer = QuantizationConfig(
                weight=specification(group.get("weights"), is_input=False, form=form),
                input_tensors=specification(group.get("input_activations"), True, form),
            )
            if format_name(layer) != form or group.get("output_activations"):
                raise ValueError(
                    f"compressed-tensors: {group} in the format {form!r} is not read here. Load "
                    "the checkpoint with compressed-tensors."
                )
            for target in names_in(group, "targets"):
                if target == "Linear":
                    whole = layer
                else:
                    layers[_pattern(target)] = layer
        cache = specification(section.get("kv_cache_scheme"), True, None)
        if cache is not None and not is_static_fp8(cache):
            raise ValueError(
                f"compressed-tensors: kv_cache_scheme={section['kv_cache_scheme']} is not read "
                "here, only static fp8 per tensor."
            )
        cached = QuantizationConfig(output_tensors=cache)
        return Config(
            whole,
            exclude=[_pattern(name) for name in names_in(section, "ignore")],
            layer_quant_config=layers,
            kv_cache_quant_config={} if cache is None else {"*k_proj": cached, "*v_proj": cached},
        )


def _groups(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what ``config_groups`` has by the names of groups."""
    groups = section.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(
            f"compressed-tensors: config_groups has to map names to groups, got {groups!r}."
        )
    return list(groups.values())


def _check_dense(section: dict[str, Any]) -> None:
    """Raise if a model computes with more than what is read here."""
    sparsity = section.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError("compressed-tensors: sparse weights (sparsity_config) are not read here.")
    if (section.get("transform_config") or {}).get("config_groups"):
        raise ValueError(
            "compressed-tensors: transforms of inputs (transform_config) are not read here."
        )


def _scheme(config: QuantizationConfig) -> dict[str, Any]:
    """Return the scheme of a layer as compressed-tensors writes it."""
    assert config.weight is not None
    inputs = config.input_tensors
    return {
        "format": format_name(config),
        "input_activations": None if inputs is None else arguments(inputs, is_input=True),
        "output_activations": None,
        "weights": arguments(config.weight, is_input=False),
    }


def _pattern(name: str) -> str:
    """Return a pattern for a name, or for an expression ``re:`` as simple as most are.

    Raises:
        ValueError: The expression says more than that names begin, end or contain something.
    """
    if not name.startswith("re:"):
        return literal(name)
    parts = name[3:].removeprefix("^").split(".*")
    plain = [re.sub(r"\\?([.\-])", r"\1", part) for part in parts]
    ends = plain[-1].endswith("$")
    plain[-1] = plain[-1].removesuffix("$")
    if any(re.search(r"[^\w.\-]", part) for part in plain):
        raise ValueError(
            f"compressed-tensors: the expression {name!r} is not read here: list the layers by "
            "their full names in config.json."
        )
    return "*".join(plain) + ("" if ends or not plain[-1] else "*")
