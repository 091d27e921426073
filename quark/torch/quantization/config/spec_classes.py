"""The documented helper classes, each of which makes the specification of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

from quark.torch.quantization.config.name_lookup import one_of
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.observer.registry import OBSERVER_METHODS, observer_class


class DataTypeSpec:
    """Base of the helper classes below; ``to_quantization_spec`` makes the full specification."""

    _base: dict[str, Any]

    def to_quantization_spec(self) -> QuantizationSpec:
        """Return the full specification.

        Raises:
            ValueError: A field contradicts the format, or a name is unknown.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        method = given.pop("observer_method", None)
        if method is not None:
            found = OBSERVER_METHODS[one_of(method, OBSERVER_METHODS, "observer_method")]
            given["observer_cls"] = observer_class(found)
        if "block_size" in given:
            given["group_size"] = given.pop("block_size")
        chosen = {name: value for name, value in given.items() if value is not None}
        return QuantizationSpec(**{**self._base, **chosen})


REQUIRED = object()
_COMMON: dict[str, Any] = {
    "scale_type": "float",
    "round_method": "half_even",
    "is_dynamic": False,
}
_SCHEME_FIELDS: dict[str, dict[str, Any]] = {
    "per_tensor": {"observer_method": "min_max"},
    "per_channel": {"ch_axis": REQUIRED},
    "per_group": {"ch_axis": REQUIRED, "group_size": REQUIRED},
}


def _row(dtype: str, qscheme: str, **defaults: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    base = {"dtype": dtype, "qscheme": qscheme}
    rest = {**_COMMON, **defaults}
    return base, {**_SCHEME_FIELDS[qscheme], "symmetric": True, **defaults, **rest}


# What FP8E4M3PerTensorSpec and the grouped 8-bit floats took in earlier versions as well.
_EARLIER: dict[str, Any] = {"symmetric": True, "round_method": "half_even"}
_EARLIER_GROUPED: dict[str, Any] = {"scale_type": "float", **_EARLIER, "symmetric": None}
_MICROSCALING: dict[str, Any] = {
    "ch_axis": REQUIRED,
    "is_dynamic": True,
    "scale_calculation_mode": "even",
}


def _grouped(dtype: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    base = {
        "dtype": dtype,
        "qscheme": "per_group",
        "scale_type": "float",
        "round_method": "half_even",
    }
    return base, {
        "ch_axis": REQUIRED,
        "group_size": REQUIRED,
        "scale_format": "float32",
        "scale_calculation_mode": None,
        "is_dynamic": True,
        **more,
    }


def _microscaling(
    dtype: str, fixed: dict[str, Any] | None = None, **defaults: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    base = {
        "dtype": dtype,
        "qscheme": "per_group",
        "group_size": 32,
        "scale_format": "e8m0",
        "scale_type": "float",
        "round_method": "half_even",
    }
    return {**base, **(fixed or {})}, {**_MICROSCALING, **defaults}


def _shared(
    dtype: str, fixed: dict[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"dtype": dtype, **(fixed or {})}, {
        "ch_axis": REQUIRED,
        **fields,
        "scale_calculation_mode": "even",
        "is_dynamic": True,
    }


_FP8: dict[str, Any] = {"qscheme": "per_tensor", **_EARLIER}
_FP8_FIELDS: dict[str, Any] = {
    "observer_method": "min_max",
    "scale_type": None,
    "is_dynamic": False,
}

# Name of the class -> (fixed fields, constructor arguments with their defaults).
_SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Int4PerTensorSpec": _row("int4", "per_tensor"),
    "Int8PerTensorSpec": _row("int8", "per_tensor"),
    "Uint4PerTensorSpec": _row("uint4", "per_tensor", symmetric=False),
    "Uint8PerTensorSpec": _row("uint8", "per_tensor", symmetric=False),
    "Int3PerChannelSpec": _row("int3", "per_channel", symmetric=False),
    "Int4PerChannelSpec": _row("int4", "per_channel"),
    "Int8PerChannelSpec": _row("int8", "per_channel", symmetric=False),
    "Uint4PerChannelSpec": _row(
        "uint4", "per_channel", symmetric=False, **_COMMON, zero_point_type="int32"
    ),
    "Uint8PerChannelSpec": _row("uint8", "per_channel"),
    "Int2PerGroupSpec": _row("int2", "per_group"),
    "Int3PerGroupSpec": _row("int3", "per_group"),
    "Int4PerGroupSpec": _row("int4", "per_group", is_dynamic=False),
    "Int8PerGroupSpec": _row("int8", "per_group"),
    "Uint4PerGroupSpec": _row("uint4", "per_group", symmetric=False, is_dynamic=False),
    "Uint8PerGroupSpec": _row("uint8", "per_group", symmetric=False),
    "FP8E4M3PerTensorSpec": ({**_FP8, "dtype": "fp8_e4m3"}, {**_FP8_FIELDS, **_EARLIER}),
    "FP8E5M2PerTensorSpec": _row("fp8_e5m2", "per_tensor"),
    "FP8E4M3PerChannelSpec": _row("fp8_e4m3", "per_channel"),
    "FP8E5M2PerChannelSpec": _row("fp8_e5m2", "per_channel"),
    "FP8E5M3PerTensorSpec": ({**_FP8, "dtype": "fp8_e5m3"}, _FP8_FIELDS),
    "FP8E4M3PerGroupSpec": _grouped("fp8_e4m3", **_EARLIER_GROUPED),
    "FP8E5M2PerGroupSpec": _grouped("fp8_e5m2", **_EARLIER_GROUPED),
    "FP6E2M3PerGroupSpec": _grouped("fp6_e2m3"),
    "FP6E3M2PerGroupSpec": _grouped("fp6_e3m2"),
    "FP4PerGroupSpec": _grouped("fp4", scale_type="float"),
    "AmdFP4Spec": (
        {
            "dtype": "fp4",
            "qscheme": "per_group",
            "scale_format": "e5m3",
            "scale_type": "float8_e5m3",
            "round_method": "half_even",
        },
        {"ch_axis": REQUIRED, "group_size": REQUIRED, "is_dynamic": True},
    ),
    "OCP_MXFP8E4M3Spec": _microscaling("fp8_e4m3"),
    "OCP_MXFP8E5M2Spec": _microscaling("fp8_e5m2"),
    "OCP_MXFP6E3M2Spec": _microscaling("fp6_e3m2"),
    "OCP_MXFP6E2M3Spec": _microscaling("fp6_e2m3"),
    "OCP_MXFP4Spec": _microscaling("fp4"),
    "OCP_MXFP4DiffsSpec": _microscaling(
        "fp4", {"observer_cls": "PerBlockMXDiffsObserver"}, is_dynamic=False
    ),
    "OCP_MXINT8Spec": (
        {"dtype": "mx", "mx_element_dtype": "int8", "group_size": 32},
        _MICROSCALING,
    ),
    "MXSpec": (
        {"dtype": "mx"},
        {"mx_element_dtype": "fp8_e4m3", "ch_axis": -1, "block_size": 32, "is_dynamic": True},
    ),
    "MX6Spec": _shared("mx6", block_size=REQUIRED),
    "MX9Spec": _shared("mx9", block_size=REQUIRED),
    "BFP16Spec": _shared("bfp16", {"group_size": 8}),
    "Float16Spec": ({"dtype": "float16"}, {}),
    "Bfloat16Spec": ({"dtype": "bfloat16"}, {}),
}


def _make(name: str, base: dict[str, Any], arguments: dict[str, Any]) -> type[DataTypeSpec]:
    what = " ".join(str(base[key]) for key in ("dtype", "qscheme") if key in base)
    required = [(f, Any) for f, default in arguments.items() if default is REQUIRED]
    optional = [
        (f, Any, field(default=default))
        for f, default in arguments.items()
        if default is not REQUIRED
    ]
    namespace = {"__doc__": f"Quantization to {what}.", "_base": base, "__module__": __name__}
    return make_dataclass(name, [*required, *optional], bases=(DataTypeSpec,), namespace=namespace)


SPEC_CLASSES: dict[str, type[DataTypeSpec]] = {n: _make(n, *row) for n, row in _SPECS.items()}
globals().update(SPEC_CLASSES)


@dataclass
class TwoStageSpec:
    """Base of the helpers that make a specification of two stages, as a list.

    Attributes:
        first_stage: Specification of the tensor, or a helper for one.
        second_stage: Specification of what the first stage leaves.
    """

    first_stage: DataTypeSpec | QuantizationSpec
    second_stage: DataTypeSpec | QuantizationSpec

    def to_quantization_spec(self) -> list[QuantizationSpec]:
        """Return the specifications of both stages."""
        return [
            stage.to_quantization_spec() if isinstance(stage, DataTypeSpec) else stage
            for stage in (self.first_stage, self.second_stage)
        ]


class ProgressiveSpec(TwoStageSpec):
    """The second stage quantizes the codes of the first, such as int4 over fp8."""


class ScaleQuantSpec(TwoStageSpec):
    """The second stage quantizes the scales of the first, such as NVFP4: fp4 with fp8 scales."""

    def to_quantization_spec(self) -> list[QuantizationSpec]:
        """Return the specifications of both stages."""
        first, second = super().to_quantization_spec()
        return [first, replace(second, is_scale_quant=True)]
