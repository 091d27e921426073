"""The format of torchao, with its tensor subclasses in safetensors.

Per layer: ``_weight_qdata``, ``_weight_scale`` and, for integers, ``_weight_zero_point``
(``layouts/torchao.py``). The header of every file describes each tensor of the model, whichever
file holds it: readers take the names from one file. ``quant_type`` of the section is the
configuration of torchao that makes such weights, or one for each layer (``FqnToConfig``).

Layers are read as headers describe them; nothing that a file names is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from quark.torch.export.formats.layer_checks import (
    integer_weight_problem,
    weight_group_size,
    weight_shape,
    weight_spec,
)
from quark.torch.export.formats.third_party import ThirdPartyFormat
from quark.torch.export.formats.torchao_schemes import (
    FLOAT_CONFIGS,
    INPUTS,
    INT8_CONFIGS,
    INTX_CONFIGS,
    PARTS,
    WHOLE,
    TorchaoScheme,
    parse_config,
    parse_metadata,
)
from quark.torch.files import parse_json
from quark.torch.numerics.dtypes import type_name
from quark.torch.numerics.formats import Format
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.match import literal
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, ScaleType

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.export.checkpoint.files import TensorHeader
    from quark.torch.export.checkpoint.headers import Entry
    from quark.torch.quantization.nn.layer import QuantizedLayer
    from quark.torch.quantization.nn.tensor_layout import TensorLayout


_SCALE_TYPES = {
    "float16": ScaleType.float16,
    "bfloat16": ScaleType.bfloat16,
    "float32": ScaleType.float32,
}
_QDATA = "._weight_qdata"
_CODES = ("_weight_qdata", "_weight_zero_point")
_SEVERAL = {"FqnToConfig": "fqn_to_config", "ModuleFqnToConfig": "module_fqn_to_config"}


class TorchaoFormat(ThirdPartyFormat):
    """Integers and fp8, weights alone or with dynamic inputs, in tensor subclasses of torchao."""

    name = "torchao"
    transformers_packages: ClassVar[Mapping[str, str]] = {"torchao": "torchao"}
    needs_headers = True
    supported = (
        "Linear layers with integer weights of 2 to 8 bits per output or in groups that divide the "
        "inputs, inputs in float or int8 per token, and fp8_e4m3 weights per output or per tensor, "
        "inputs in float or dynamic fp8 of the same granularity"
    )
    tensor_names: ClassVar = {
        "weight": "_weight_qdata",
        "weight_scale": "_weight_scale",
        "weight_zero_point": "_weight_zero_point",
    }
    schemes: Mapping[str, TorchaoScheme] = {}
    described: Mapping[str, str] = {}  # metadata of each weight, as text in JSON
    formats: Mapping[str, Format] = {}  # of the integer weights that are read

    @property
    def layout(self) -> TensorLayout:
        """Layout of the tensors."""
        from quark.torch.export.formats.layouts.torchao import TorchaoLayout

        return TorchaoLayout()

    def check_model(self, model: nn.Module) -> None:
        """Check that a model has no experts that were split: torchao has them stacked.

        Raises:
            ValueError: It has.
        """
        from quark.torch.quantization.nn.linear_experts import LinearExperts

        name = next((n for n, m in model.named_modules() if isinstance(m, LinearExperts)), None)
        if name is not None:
            raise ValueError(
                f"custom_mode='torchao' cannot hold the experts of {name}, which torchao stacks. "
                "Exclude them, or use custom_mode='quark' or 'compressed-tensors'."
            )

    def check_writable(
        self, layers: Mapping[str, QuantizedLayer], float_layers: Sequence[str]
    ) -> None:
        """Check every layer, and record what headers say of each."""
        super().check_writable(layers, float_layers)
        self.schemes = {name: _scheme_of(layer) for name, layer in layers.items()}
        self.described = {
            name: json.dumps(
                self.schemes[name].metadata(weight_shape(layer), type_name(layer.value_dtype))
            )
            for name, layer in layers.items()
        }

    def layer_problem(self, name: str, layer: QuantizedLayer) -> str | None:
        """Return why the format cannot hold a layer, or None."""
        from quark.torch.numerics.scale_codec import stored_dtype

        weight, inputs = weight_spec(layer), layer.quant_config.input_tensors
        group, width = weight_group_size(weight), weight_shape(layer)[1]
        if weight.dtype is Dtype.fp8_e4m3 and weight.second_stage is None:
            if weight.scheme.qscheme is not QSchemeType.per_tensor and not _has_rows(weight):
                return f"its weight has scales {weight.scheme.qscheme.name}"
        elif problem := integer_weight_problem(weight, range(2, 9)):
            return problem
        if type_name(stored_dtype(weight.scheme)) not in _SCALE_TYPES:
            return f"its scales are {stored_dtype(weight.scheme)}"
        if group > 0 and width % group:
            return f"its {width} inputs have groups of {group}"
        if inputs is not None and _input_name(weight, inputs) is None:
            return f"its input is {inputs.dtype.name} {inputs.scheme.qscheme.name}"
        return None

    def file_metadata(self, entries: Mapping[str, Entry]) -> dict[str, str]:
        """Return what the header of each file says of all tensors; see ``ExportFormat``."""
        described, quantized = {}, set()
        for key in entries:
            if key.endswith(_QDATA):
                layer = key.removesuffix(_QDATA)
                described[f"{layer}.weight"] = self.described[layer]
                quantized |= {f"{layer}._weight_{part}" for part in PARTS}
        plain = json.dumps({"_type": "Tensor"})
        described |= {key: plain for key in entries if key not in quantized}
        return {**described, "tensor_names": json.dumps(list(described))}

    def config_section(self) -> dict[str, Any]:
        """Return the section that Transformers and vLLM read."""
        first, *others = dict.fromkeys(self.schemes.values())
        kind = first.config()
        if others:
            named = {name: scheme.config() for name, scheme in self.schemes.items()}
            kind = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": named}}
        return {
            "include_input_output_embeddings": False,
            "modules_to_not_convert": list(self.float_layers),
            "quant_method": self.name,
            "quant_type": {"default": kind},
            "untie_embedding_weights": False,
        }

    @classmethod
    def parse_section(cls, section: dict[str, Any]) -> Config:
        """Return the configuration of all linear layers; headers say which are in float.

        Raises:
            ValueError: ``quant_type`` is not supported.
        """
        given = section.get("quant_type")
        try:
            if not isinstance(given, dict) or set(given) != {"default"}:
                raise ValueError(f"{given!r} has no configuration 'default'")
            default, others = _parse_several(given["default"])
        except ValueError as error:
            raise _refusal(f"quant_type: {error}") from None
        layers = {literal(name): scheme.layer() for name, scheme in others.items()}
        return Config(default.layer(), layer_quant_config=layers)

    def stored_layers(
        self, layers: dict[str, QuantizationConfig], reader: Any
    ) -> dict[str, QuantizationConfig]:
        """Return the layers in codes, as the headers of the files describe them.

        Raises:
            ValueError: A header describes a weight otherwise than it is stored, or one that is not
                supported, or no layer is stored in codes.
        """
        stored = {
            key.removesuffix(_QDATA): self._read_layer(key.removesuffix(_QDATA), reader)
            for key in reader.entries
            if key.endswith(_QDATA)
        }
        unknown = [name for name in stored if name not in layers]
        if unknown:
            raise _refusal(
                f"{unknown[0]} is quantized, but is no linear layer of the model: embeddings and "
                "experts are not read"
            )
        if not stored:
            raise _refusal("every weight is stored in float")
        exclude = [*self.config.exclude, *(literal(n) for n in layers if n not in stored)]
        named = {literal(name): layer for name, layer in stored.items()}
        weights = {name: layer.weight for name, layer in stored.items() if layer.weight}
        self.formats = {n: w.fmt for n, w in weights.items() if not w.fmt.is_float}
        self.config = replace(self.config, layer_quant_config=named, exclude=exclude)
        return {name: stored[name] for name in layers if name in stored}

    def _read_layer(self, name: str, reader: Any) -> QuantizationConfig:
        """Return the configuration of a layer that the header of its file describes."""
        entries: dict[str, TensorHeader] = reader.entries
        text = getattr(reader, "metadata", {}).get(f"{name}.weight")
        codes, scale = (entries.get(f"{name}._weight_{part}") for part in PARTS[:2])
        zeros = f"{name}._weight_zero_point"
        try:
            if text is None:
                raise ValueError("no header of a file describes it")
            if codes is None or len(codes.shape) != 2:
                raise ValueError("its codes are no matrix")
            described = parse_json(text.encode(), name)
            symmetric = zeros not in entries or not reader.tensor(zeros).count_nonzero()
            scheme = parse_metadata(described, codes.shape, symmetric)
            if (PARTS[2] in described["_tensor_data_names"]) is not (zeros in entries):
                raise ValueError("its zero points are described and not stored, or stored alone")
        except ValueError as error:
            raise _refusal(f"{name}.weight: {error}") from None
        scale_type = None if scale is None else _SCALE_TYPES.get(type_name(scale.dtype))
        return scheme.layer(scale_type or ScaleType.float32)

    def convert_loaded(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a stored tensor.

        Raises:
            ValueError: A code or a zero point is outside of the number format of its weight.
        """
        layer, _, part = key.rpartition(".")
        fmt = self.formats.get(layer)
        if fmt is None or part not in _CODES or not tensor.numel():
            return tensor
        least, largest = int(tensor.min()), int(tensor.max())
        if least < fmt.qmin or largest > fmt.qmax:
            raise _refusal(f"{key} is from {least} to {largest}, outside of {fmt.name}")
        return tensor

    def weight_count(self, spec: QuantizationSpec, codes: Entry, scale: Entry | None) -> int:
        """Return the number of weights: a byte each."""
        return prod(codes.shape)


def _refusal(problem: str) -> ValueError:
    """Return the error for a checkpoint that is damaged, or otherwise than those that are read."""
    kinds = ", ".join((*FLOAT_CONFIGS, *INT8_CONFIGS, *INTX_CONFIGS))
    return ValueError(
        f"quant_method='torchao': {problem}. Copy the checkpoint again. If it is as torchao wrote "
        f"it, quantize the linear layers of the float model with one of {kinds}, and call "
        "save_pretrained."
    )


def _scheme_of(layer: QuantizedLayer) -> TorchaoScheme:
    """Return the scheme of a layer that the format can hold."""
    weight, inputs = weight_spec(layer), layer.quant_config.input_tensors
    is_whole = weight.scheme.qscheme is QSchemeType.per_tensor
    group = WHOLE if is_whole else weight_group_size(weight)
    name = "" if inputs is None else _input_name(weight, inputs) or ""
    dtype = weight.dtype.name.removeprefix("u")
    return TorchaoScheme(dtype, group, bool(weight.scheme.symmetric), name)


def _has_rows(spec: QuantizationSpec) -> bool:
    """Whether a weight has one scale per output."""
    return spec.scheme.qscheme is QSchemeType.per_channel and spec.scheme.axis in (-2, 0)


def _input_name(weight: QuantizationSpec, inputs: QuantizationSpec) -> str | None:
    """Return the key of ``INPUTS`` of a layer, None if torchao has no such inputs."""
    scheme, is_float = inputs.scheme, weight.dtype is Dtype.fp8_e4m3
    per_token = scheme.per_token and scheme.qscheme is QSchemeType.per_channel
    whole = scheme.qscheme is QSchemeType.per_tensor
    if not inputs.is_dynamic or inputs.second_stage is not None or not (per_token or whole):
        return None
    if is_float and per_token is not _has_rows(weight):
        return None
    asked = (inputs.dtype.name, bool(per_token), inputs.fmt.is_float or bool(scheme.symmetric))
    name = next((name for name, known in INPUTS.items() if known == asked), None)
    return name if name is not None and name.startswith("fp8") == is_float else None


def _parse_several(described: Any) -> tuple[TorchaoScheme, dict[str, TorchaoScheme]]:
    """Return the scheme of most layers and those of others, by name."""
    key = _SEVERAL.get(str(described.get("_type"))) if isinstance(described, dict) else None
    if key is None:
        return parse_config(described), {}
    data = described.get("_data")
    given = data.get(key) if isinstance(data, dict) else None
    if not isinstance(given, dict):
        raise ValueError(f"{key}={given!r} is no object")
    patterns = [name for name in given if name.startswith("re:")]
    if patterns:
        raise ValueError(f"the pattern {patterns[0]!r} is not supported: name the layers")
    schemes = {name: parse_config(value) for name, value in given.items() if value is not None}
    if not schemes:
        raise ValueError(f"{key} quantizes nothing")
    default = schemes.pop("_default", None)
    return default or next(iter(schemes.values())), schemes
