"""Schemes of torchao: tensor subclasses in headers of files, and their configurations.

``TorchaoScheme`` is what both describe. A header has it for each weight, as text in JSON::

    {"_type": "Int8Tensor", "_data": {"block_size": [1, 1024], …}, "_tensor_data_names": […]}

``config.json`` has the configuration that made the weights, such as ``Int8WeightOnlyConfig``. The
names are compared with those below and never imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.type import Dtype, ScaleType

WHOLE, ROW = 0, -1  # group sizes of one scale per tensor, and of one per output
# Dynamic inputs by name: (number format, one scale per token, symmetric).
INPUTS: dict[str, tuple[str, bool, bool]] = {
    "int8 per token": ("int8", True, True),
    "int8 per token asymmetric": ("int8", True, False),
    "fp8 per token": ("fp8_e4m3", True, True),
    "fp8 per tensor": ("fp8_e4m3", False, True),
}
FLOAT, INT8, ANY_INTEGER = "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor"
PARTS = ("qdata", "scale", "zero_point")
# Configurations that are read, those of weights alone first.
FLOAT_CONFIGS = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
INT8_CONFIGS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
INTX_CONFIGS = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_FP8 = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
_AUTO = {"_type": "KernelPreference", "_data": "AUTO"}
_ASYMMETRIC_TOKENS = "int8_asym_per_token"


class TorchaoScheme(NamedTuple):
    """How torchao quantizes a linear layer.

    Attributes:
        dtype: Number format of the weight: "fp8_e4m3", "int8", "int4" and so on.
        group: Inputs that share a scale; ``ROW`` or ``WHOLE``.
        symmetric: Whether all zero points of the weight are 0.
        inputs: Key of ``INPUTS``, "" for inputs in float.
    """

    dtype: str
    group: int
    symmetric: bool = True
    inputs: str = ""

    @property
    def tensor_class(self) -> str:
        """Class of the weight in torchao."""
        if self.dtype == "fp8_e4m3":
            return FLOAT
        # Products of torchao leave out zero points of an Int8Tensor.
        plain = self.dtype == "int8" and self.symmetric and self.inputs in ("", "int8 per token")
        return INT8 if plain else ANY_INTEGER

    def layer(self, scale_type: ScaleType = ScaleType.float32) -> QuantizationConfig:
        """Return the configuration of a layer."""
        where: dict[str, Any] = {"qscheme": QSchemeType.per_tensor}
        if self.group == ROW:
            where = {"qscheme": QSchemeType.per_channel, "ch_axis": 0}
        elif self.group != WHOLE:
            where = {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": self.group}
        weight = QuantizationSpec(
            Dtype[self.dtype],
            symmetric=self.symmetric,
            is_dynamic=False,
            scale_type=scale_type,
            **where,
        )
        return QuantizationConfig(weight=weight, input_tensors=self._input_spec())

    def _input_spec(self) -> QuantizationSpec | None:
        if not self.inputs:
            return None
        dtype, per_token, symmetric = INPUTS[self.inputs]
        where = {"qscheme": "per_channel", "ch_axis": 1} if per_token else {"qscheme": "per_tensor"}
        return QuantizationSpec(Dtype[dtype], symmetric=symmetric, is_dynamic=True, **where)

    def metadata(self, shape: tuple[int, int], dtype: str) -> dict[str, Any]:
        """Return what the header of a file says of a weight.

        Args:
            shape: Outputs and inputs.
            dtype: Type of its values, such as "bfloat16".
        """
        blocks = {ROW: [1, shape[1]], WHOLE: list(shape)}
        data: dict[str, Any] = {
            "block_size": blocks.get(self.group, [1, self.group]),
            "dtype": {"_type": "torch.dtype", "_data": dtype},
        }
        if self.tensor_class == ANY_INTEGER:
            data["target_dtype"] = {"_type": "torch.dtype", "_data": self.dtype}
            data["activation_quantization"] = _ASYMMETRIC_TOKENS if self.inputs else None
        else:
            data["act_quant_kwargs"] = self._input_metadata()
            extra = {"mm_config": None, "kernel_preference": _AUTO}
            data |= extra if self.tensor_class == FLOAT else {"reduce_range": False}
        names = PARTS[:2] if self.tensor_class == FLOAT else PARTS
        return {"_type": self.tensor_class, "_data": data, "_tensor_data_names": list(names)}

    def _input_metadata(self) -> dict[str, Any] | None:
        if not self.inputs:
            return None
        by_token = INPUTS[self.inputs][1]
        rows = {"_type": "PerRow", "_data": {"dim": -1}}
        shared = {"granularity": rows if by_token else {"_type": "PerTensor", "_data": {}}}
        if self.tensor_class == INT8:
            symmetric = {"_type": "MappingType", "_data": "SYMMETRIC"}
            integer = {**shared, "mapping_type": symmetric, "reduce_range": False}
            return {"_type": "QuantizeTensorToInt8Kwargs", "_data": integer}
        bounds = {"mm_config": None, "hp_value_lb": None, "hp_value_ub": None}
        data = {"float8_dtype": _FP8, **shared, **bounds, "kernel_preference": _AUTO}
        return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": data}

    def config(self) -> dict[str, Any]:
        """Return the configuration of torchao that makes such weights."""
        data: dict[str, Any] = {"granularity": _granularity(self.group)}
        if self.tensor_class == INT8:
            dynamic = "Int8DynamicActivationInt8WeightConfig"
            return _config(dynamic if self.inputs else "Int8WeightOnlyConfig", data)
        if self.tensor_class == FLOAT:
            data["weight_dtype"] = _FP8
            if not self.inputs:
                return _config("Float8WeightOnlyConfig", data)
            data |= {"granularity": [data["granularity"]] * 2, "activation_dtype": _FP8}
            return _config("Float8DynamicActivationFloat8WeightConfig", data)
        prefix = "weight_" if self.inputs else ""
        rows = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
        mapping = "SYMMETRIC" if self.symmetric else "ASYMMETRIC"
        data = {
            "weight_dtype": {"_type": "torch.dtype", "_data": self.dtype},
            f"{prefix}granularity": rows if self.group == ROW else _granularity(self.group),
            f"{prefix}mapping_type": {"_type": "MappingType", "_data": mapping},
        }
        dynamic = "Int8DynamicActivationIntxWeightConfig"
        return _config(dynamic if self.inputs else "IntxWeightOnlyConfig", data)


def parse_metadata(described: Any, shape: Sequence[int], symmetric: bool) -> TorchaoScheme:
    """Return the scheme of a weight that the header of a file describes.

    Args:
        described: The JSON value.
        shape: Outputs and inputs.
        symmetric: Whether all its zero points are 0.

    Raises:
        ValueError: It is not supported.
    """
    kind, data = _typed(described)
    names = described.get("_tensor_data_names")
    if not isinstance(names, list) or any(name not in PARTS for name in names):
        raise ValueError(f"tensors {names!r} are not supported (supported: {', '.join(PARTS)})")
    group = _group_of(data.get("block_size"), shape)
    if kind == ANY_INTEGER:
        dtype = _choice(data, "target_dtype", [_dtype(f"int{bits}") for bits in range(2, 9)])
        inputs = _choice(data, "activation_quantization", [None, _ASYMMETRIC_TOKENS])
        return TorchaoScheme(
            dtype["_data"], group, symmetric, "int8 per token asymmetric" if inputs else ""
        )
    if kind == FLOAT:
        return TorchaoScheme("fp8_e4m3", group, inputs=_inputs_of(data, "fp8"))
    if kind == INT8:
        if not symmetric:
            raise ValueError("an Int8Tensor has zero points, which products of torchao leave out")
        return TorchaoScheme("int8", group, inputs=_inputs_of(data, "int8"))
    raise ValueError(f"a weight is a {kind!r} (supported: {', '.join((FLOAT, INT8, ANY_INTEGER))})")


def parse_config(described: Any) -> TorchaoScheme:
    """Return the scheme that a configuration of torchao describes.

    Raises:
        ValueError: It is not supported.
    """
    kind, data = _typed(described)
    if kind in FLOAT_CONFIGS:
        _choice(data, "weight_dtype", [_FP8], _FP8)
        _choice(data, "activation_dtype", [_FP8], _FP8)
        group = _group_size(data, "granularity", ROW if kind[6] == "W" else WHOLE)
        inputs = "fp8 per token" if group == ROW else "fp8 per tensor"
        return TorchaoScheme("fp8_e4m3", group, inputs="" if kind[6] == "W" else inputs)
    if kind in INT8_CONFIGS:
        inputs = "" if kind[4] == "W" else "int8 per token"
        return TorchaoScheme("int8", _group_size(data, "granularity", ROW), inputs=inputs)
    if kind in INTX_CONFIGS:
        prefix, default = ("", ROW) if kind[4] == "W" else ("weight_", 32)
        dtype = _choice(
            data, "weight_dtype", [_dtype(f"int{b}") for b in range(2, 9)], _dtype("int8")
        )
        mapping = data.get(f"{prefix}mapping_type") or {"_data": "SYMMETRIC"}
        group = _group_size(data, f"{prefix}granularity", default)
        inputs = "int8 per token asymmetric" if prefix else ""
        return TorchaoScheme(dtype["_data"], group, mapping.get("_data") != "ASYMMETRIC", inputs)
    raise ValueError(f"{kind!r} is not supported")


def _typed(described: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of a class and its attributes."""
    kind, data = (
        described.get(k) if isinstance(described, dict) else None for k in ("_type", "_data")
    )
    if not isinstance(kind, str) or not isinstance(data, dict):
        raise ValueError(f"{described!r} is no object with _type and _data")
    return kind, data


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def _config(kind: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def _granularity(group: int) -> dict[str, Any]:
    named: dict[int, tuple[str, dict[str, int]]] = {
        ROW: ("PerRow", {"dim": -1}),
        WHOLE: ("PerTensor", {}),
    }
    kind, data = named.get(group, ("PerGroup", {"group_size": group}))
    return {"_type": kind, "_version": 1, "_data": data}


def _group_size(data: Mapping[str, Any], key: str, default: int) -> int:
    """Return the group size that a granularity describes, of two that of the weight."""
    given, size = data.get(key), data.get("group_size")  # this in older versions
    given = given[-1] if isinstance(given, list) and given else given
    if given is None:
        return size if type(size) is int and size > 0 else default
    kind, fields = _typed(given)
    known = {"PerRow": ROW, "PerAxis": ROW, "PerTensor": WHOLE}
    if kind in known:
        return known[kind]
    size = fields.get("group_size")
    if kind == "PerGroup" and type(size) is int and size > 0:
        return size
    raise ValueError(f"{key}={given!r} is not supported")


def _group_of(block: Any, shape: Sequence[int]) -> int:
    """Return the group size of blocks of a weight."""
    sizes = block if isinstance(block, list) else []
    if len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        if block == [1, shape[1]]:
            return ROW
        if block == list(shape):
            return WHOLE
        if block[0] == 1 and shape[1] % block[1] == 0:
            return int(block[1])
    raise ValueError(f"block_size={block!r} of a weight of {list(shape)} is not supported")


def _inputs_of(data: Mapping[str, Any], number: str) -> str:
    """Return the key of ``INPUTS`` that the attributes of a weight describe."""
    given = data.get("act_quant_kwargs")
    if given is None:
        return ""
    kind, fields = _typed(given)
    granularity, _ = _typed(fields.get("granularity"))
    mapping = fields.get("mapping_type") or {"_data": "SYMMETRIC"}
    plain = fields.get("float8_dtype", _FP8) == _FP8 and not fields.get("reduce_range")
    plain = plain and fields.get("hp_value_lb") is None and fields.get("hp_value_ub") is None
    where = {"PerRow": "per token", "PerTensor": "per tensor"}.get(granularity, "")
    name = f"{number} {where}" + " asymmetric" * (mapping.get("_data") != "SYMMETRIC")
    expected = {"int8": "QuantizeTensorToInt8Kwargs", "fp8": "QuantizeTensorToFloat8Kwargs"}
    if kind != expected[number] or not plain or name not in INPUTS:
        raise ValueError(f"act_quant_kwargs={given!r} is not supported")
    return name


def _choice(data: Mapping[str, Any], key: str, known: Sequence[Any], default: Any = None) -> Any:
    value = data.get(key, default)
    if value not in known:
        raise ValueError(f"{key}={value!r} is not supported")
    return value
