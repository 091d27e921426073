"""The table of the documented helper classes: one row each."""

from __future__ import annotations

from typing import Any

REQUIRED = object()
# Types of the arguments, as source text: annotations of the classes, and of their stub.
TYPES = {
    "block_size": "int",
    "ch_axis": "int",
    "group_size": "int",
    "is_dynamic": "bool | None",
    "mx_element_dtype": "Dtype | str",
    "observer_method": "str | None",
    "round_method": "RoundType | str | None",
    "scale_calculation_mode": "str | None",
    "scale_format": "str | None",
    "scale_type": "ScaleType | str | None",
    "symmetric": "bool | None",
    "zero_point_type": "ZeroPointType | str",
}
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


# Arguments of FP8E4M3PerTensorSpec and of the grouped 8-bit floats in earlier versions.
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
SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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
