"""Named schemes: the configuration of a layer by name, for layers and the key-value cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.name_lookup import nearest, one_of
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.config.spec_classes import SPEC_CLASSES

GROUP_SIZE = 128

# Specification of one tensor by a short name: (dtype, granularity, symmetric, dynamic). Names
# that end in "signed" have signed scales.
_TENSORS: dict[str, tuple[str, str, bool, bool]] = {
    "int2_group": ("int2", "per_group", True, False),
    "int2_group_signed": ("int2", "per_group", True, False),
    "int2_group_asym": ("int2", "per_group", False, False),
    "int3_group": ("int3", "per_group", True, False),
    "int3_group_signed": ("int3", "per_group", True, False),
    "int3_channel": ("int3", "per_channel", True, False),
    "int4_channel": ("int4", "per_channel", True, False),
    "int4_channel_asym": ("int4", "per_channel", False, False),
    "int4_group": ("int4", "per_group", True, False),
    "int4_group_signed": ("int4", "per_group", True, False),
    "int4_group_asym": ("int4", "per_group", False, False),
    "int4_group_dynamic": ("int4", "per_group", True, True),
    "int4_head": ("int4", "per_head", True, False),
    "int4_token_head": ("int4", "per_head", True, True),
    "uint4_channel": ("uint4", "per_channel", True, False),
    "uint4_channel_asym": ("uint4", "per_channel", False, False),
    "uint4_group": ("uint4", "per_group", True, False),
    "uint4_group_asym": ("uint4", "per_group", False, False),
    "uint4_group_dynamic": ("uint4", "per_group", False, True),
    "uint4_token": ("uint4", "per_token", False, True),
    "int5_group": ("int5", "per_group", True, False),
    "int6_group": ("int6", "per_group", True, False),
    "int7_group": ("int7", "per_group", True, False),
    "int8": ("int8", "per_tensor", True, False),
    "int8_dynamic": ("int8", "per_tensor", True, True),
    "int8_channel": ("int8", "per_channel", True, False),
    "int8_group": ("int8", "per_group", True, False),
    "int8_token": ("int8", "per_token", True, True),
    "int8_head": ("int8", "per_head", True, False),
    "int8_token_head": ("int8", "per_head", True, True),
    "uint8_asym": ("uint8", "per_tensor", False, False),
    "uint8_group_asym": ("uint8", "per_group", False, False),
    "fp8": ("fp8_e4m3", "per_tensor", True, False),
    "fp8_dynamic": ("fp8_e4m3", "per_tensor", True, True),
    "fp8_e5m3": ("fp8_e5m3", "per_tensor", True, False),
    "fp8_channel": ("fp8_e4m3", "per_channel", True, False),
    "fp8_token": ("fp8_e4m3", "per_token", True, True),
    "fp8_head": ("fp8_e4m3", "per_head", True, False),
    "fp4_head": ("fp4", "per_head", True, False),
    "bfloat16": ("bfloat16", "", True, False),
    "float16": ("float16", "", True, False),
}

# Specification of one tensor by a short name: (helper class, its arguments). By default the axis is
# the last one and the group size is that of the caller.
_HELPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8_mse": ("Int8PerTensorSpec", {"observer_method": "MSE"}),
    "int8_percentile": ("Int8PerTensorSpec", {"observer_method": "percentile"}),
    "uint8": ("Uint8PerTensorSpec", {"symmetric": True}),
    "uint8_mse": ("Uint8PerTensorSpec", {"symmetric": True, "observer_method": "MSE"}),
    "uint8_percentile": (
        "Uint8PerTensorSpec",
        {"symmetric": True, "observer_method": "percentile"},
    ),
    "mxfp4": ("OCP_MXFP4Spec", {"is_dynamic": False}),
    "mxfp4_diffs": ("OCP_MXFP4DiffsSpec", {}),
    "mxfp4_dynamic": ("OCP_MXFP4Spec", {}),
    "mxfp6_e3m2": ("OCP_MXFP6E3M2Spec", {"is_dynamic": False}),
    "mxfp6_e3m2_dynamic": ("OCP_MXFP6E3M2Spec", {}),
    "mxfp6_e2m3": ("OCP_MXFP6E2M3Spec", {"is_dynamic": False}),
    "mxfp6_e2m3_dynamic": ("OCP_MXFP6E2M3Spec", {}),
    "mxfp8": ("OCP_MXFP8E4M3Spec", {"is_dynamic": False}),
    "mxfp8_dynamic": ("OCP_MXFP8E4M3Spec", {}),
    "mxint8": ("OCP_MXINT8Spec", {}),
    "mx6": ("MX6Spec", {"block_size": 16}),
    "mx9": ("MX9Spec", {"block_size": 16}),
    "bfp16": ("BFP16Spec", {}),
    "amdfp4": ("AmdFP4Spec", {"is_dynamic": False}),
    "amdfp4_dynamic": ("AmdFP4Spec", {}),
    "fp4_group": ("FP4PerGroupSpec", {"is_dynamic": False}),
    "fp4_group_dynamic": ("FP4PerGroupSpec", {}),
    "fp6_e2m3": ("FP6E2M3PerGroupSpec", {"is_dynamic": False}),
    "fp6_e2m3_dynamic": ("FP6E2M3PerGroupSpec", {}),
    "fp6_e3m2": ("FP6E3M2PerGroupSpec", {"is_dynamic": False}),
    "fp6_e3m2_dynamic": ("FP6E3M2PerGroupSpec", {}),
    "fp8_group_dynamic": ("FP8E4M3PerGroupSpec", {}),
}

# Observers of tensors that need another one than minimum and maximum.
_OBSERVERS = {"int4_head": "PerHeadMSEObserver", "fp4_head": "PerHeadMSEObserver"}

# Two stages by a short name: (first, second, whether the second quantizes the scales).
_STAGES: dict[str, tuple[str, str, bool]] = {
    "nvfp4": ("fp4_group@16", "fp8", True),
    "nvfp4_dynamic": ("fp4_group_dynamic@16", "fp8", True),
    "amdfp4_global": ("fp4_group", "fp8_e5m3", True),
    "amdfp4_global_dynamic": ("fp4_group_dynamic", "fp8_e5m3", True),
    "int4_fp8": ("fp8", "int4_channel", False),
}

# Name of a scheme -> (weight, input, output), each a row above or None. "@" precedes a group size.
_Row = tuple[str | None, str | None, str | None]
_SCHEMES: dict[str, _Row] = {
    # current names
    "int8": ("int8", "int8", None),
    "int8_wo": ("int8_channel", None, None),
    "ptpc_int8": ("int8_channel", "int8_token", None),
    "fp8": ("fp8", "fp8", None),
    "fp8_wo": ("fp8_channel", None, None),
    "ptpc_fp8": ("fp8_channel", "fp8_token", None),
    "int4_wo_per_channel": ("int4_channel", None, None),
    "uint4_wo_per_channel": ("uint4_channel_asym", None, None),
    "int3_wo_per_channel": ("int3_channel", None, None),
    "mxfp4": ("mxfp4", "mxfp4_dynamic", None),
    "mxfp4_weight_only": ("mxfp4", None, None),
    "mxfp6_e3m2": ("mxfp6_e3m2", "mxfp6_e3m2_dynamic", None),
    "mxfp6_e2m3": ("mxfp6_e2m3", "mxfp6_e2m3_dynamic", None),
    "mxfp4_mxfp6_e2m3": ("mxfp4", "mxfp6_e2m3_dynamic", None),
    "mxfp4_fp8": ("mxfp4", "fp8", None),
    "mxfp8": ("mxfp8", "mxfp8_dynamic", None),
    "nvfp4": ("nvfp4", "nvfp4_dynamic", None),
    "nvfp4_weight_only": ("nvfp4", None, None),
    "fp4_block16_scale_e4m3": ("nvfp4", "nvfp4_dynamic", None),
    "amdfp4": ("amdfp4@16", "amdfp4_dynamic@16", None),
    "amdfp4_g32": ("amdfp4@32", "amdfp4_dynamic@32", None),
    "amdfp4_global16": ("amdfp4_global@16", "amdfp4_global_dynamic@16", None),
    "amdfp4_global32": ("amdfp4_global@32", "amdfp4_global_dynamic@32", None),
    "int4_fp8": ("int4_fp8", "fp8", None),
    "mx6": ("mx6", "mx6", None),
    "mx9": ("mx9", "mx9", None),
    "bfp16": ("bfp16", "bfp16", None),
    "bfloat16": ("bfloat16", None, None),
    "float16": ("float16", None, None),
    **{name: (name, None, None) for name in BLOCK_SCHEMES},
    # names of earlier versions; the caller chooses the group size of "per_group"
    "w_fp8_a_fp8": ("fp8", "fp8", None),
    "w_fp8_a_fp8_o_fp8": ("fp8", "fp8", "fp8"),
    "w_fp8_per_channel_sym": ("fp8_channel", "fp8", "fp8"),
    "w_int2_per_group_asym": ("int2_group_asym", None, None),
    "w_int4_per_channel_asym": ("int4_channel_asym", None, None),
    "w_int4_per_channel_sym": ("int4_channel", None, None),
    "w_int4_per_group_asym": ("int4_group_asym", None, None),
    "w_int4_per_group_sym": ("int4_group", None, None),
    "w_int4_per_group_a_int8_per_token_dynamic": ("int4_group", "int8_token", None),
    "w_int4_per_group_a_fp8_per_token_dynamic": ("int4_group", "fp8_token", None),
    "w_int8_a_int8_per_tensor_sym": ("int8", "int8", None),
    "w_int8_a_int8_per_tensor_sym_dynamic": ("int8", "int8_dynamic", None),
    "w_int8_a_int8_per_token_dynamic": ("int8", "int8_token", None),
    "w_int8_per_channel_a_int8_per_tensor_sym": ("int8_channel", "int8", None),
    "w_int8_per_channel_a_int8_per_tensor_sym_dynamic": ("int8_channel", "int8_dynamic", None),
    "w_int8_per_channel_a_int8_per_tensor_dynamic": ("int8_channel", "int8_dynamic", None),
    "w_int8_per_group_sym": ("int8_group", None, None),
    "w_int8_per_tensor_mse": ("int8_mse", "int8", None),
    "w_int8_per_tensor_percentile": ("int8_percentile", "int8", None),
    "w_int8_per_tensor_sym": ("int8", None, None),
    "w_bfp16": ("bfp16", None, None),
    "w_bfp16_a_bfp16": ("bfp16", "bfp16", None),
    "w_bfp16_per_group_sym": ("bfp16", None, None),
    "w_fp4_per_group": ("fp4_group", None, None),
    "w_fp4_per_group_a_fp4_per_group": ("fp4_group", "fp4_group_dynamic", None),
    "w_fp4_per_group_a_fp8_e4m3_per_group": ("fp4_group", "fp8_group_dynamic", None),
    "w_fp6_e2m3_per_group_a_fp6_e2m3_per_group": ("fp6_e2m3", "fp6_e2m3_dynamic", None),
    "w_fp6_e3m2_per_group_a_fp6_e3m2_per_group": ("fp6_e3m2", "fp6_e3m2_dynamic", None),
    "w_fp4_scale_fp8": ("nvfp4", None, None),
    "w_fp4_a_fp4_scale_fp8": ("nvfp4", "nvfp4_dynamic", None),
    "w_mx6": ("mx6", None, None),
    "w_mx6_a_mx6": ("mx6", "mx6", None),
    "w_mx9": ("mx9", None, None),
    "w_mxfp4": ("mxfp4", None, None),
    "w_mxfp4_diffs": ("mxfp4_diffs", None, None),
    "w_mxfp4_a_fp8": ("mxfp4", "fp8", None),
    "w_mxfp4_a_fp8_dynamic": ("mxfp4", "fp8_dynamic", None),
    "w_mxfp4_a_mxfp4": ("mxfp4", "mxfp4_dynamic", None),
    "w_mxfp4_a_mxfp6": ("mxfp4", "mxfp6_e2m3_dynamic", None),
    "w_mxfp4_a_mxfp6_e2m3": ("mxfp4", "mxfp6_e2m3_dynamic", None),
    "w_mxfp4_a_mxfp6_e3m2": ("mxfp4", "mxfp6_e3m2_dynamic", None),
    "w_mxfp4_a_mxfp8": ("mxfp4", "mxfp8_dynamic", None),
    "w_mxfp6_e2m3": ("mxfp6_e2m3", None, None),
    "w_mxfp6_e2m3_a_mxfp6_e2m3": ("mxfp6_e2m3", "mxfp6_e2m3_dynamic", None),
    "w_mxfp6_e3m2": ("mxfp6_e3m2", None, None),
    "w_mxfp6_e3m2_a_mxfp6_e3m2": ("mxfp6_e3m2", "mxfp6_e3m2_dynamic", None),
    "w_mxfp8": ("mxfp8", None, None),
    "w_mxfp8_a_mxfp8": ("mxfp8", "mxfp8_dynamic", None),
    "w_mxint8": ("mxint8", None, None),
    "w_uint4_a_bfloat16_per_group_asym": ("uint4_group_asym", "bfloat16", None),
    "w_uint4_a_uint4_per_channel": ("uint4_channel_asym", "uint4_token", None),
    "w_uint4_per_channel_a_int8_per_tensor": ("uint4_channel_asym", "int8", None),
    "w_uint4_per_channel_asym": ("uint4_channel_asym", None, None),
    "w_uint4_per_channel_sym": ("uint4_channel", None, None),
    "w_uint4_per_group_a_int8_per_tensor": ("uint4_group_asym", "int8", None),
    "w_uint4_per_group_asym": ("uint4_group_asym", None, None),
    "w_uint4_per_group_sym": ("uint4_group", None, None),
    "w_uint4_per_token_a_int8_per_channel": ("uint4_channel_asym", "int8_token", None),
    "w_uint8_a_uint8_per_tensor_asym": ("uint8_asym", "uint8_asym", None),
    "w_uint8_per_group_asym": ("uint8_group_asym", None, None),
    "w_uint8_per_tensor_mse": ("uint8_mse", "uint8", None),
    "w_uint8_per_tensor_percentile": ("uint8_percentile", "uint8", None),
}

# Names that end in a group size: prefix -> row.
_GROUPED: dict[str, _Row] = {
    "int2_wo": ("int2_group", None, None),
    "int3_wo": ("int3_group", None, None),
    "int4_wo": ("int4_group", None, None),
    "int4_wa": ("int4_group", "int4_group_dynamic", None),
    "int2_wo_signed": ("int2_group_signed", None, None),
    "int3_wo_signed": ("int3_group_signed", None, None),
    "int4_wo_signed": ("int4_group_signed", None, None),
    "int4_wa_signed": ("int4_group_signed", "int4_group_dynamic", None),
    "uint4_wo": ("uint4_group_asym", None, None),
    "int5_wo": ("int5_group", None, None),
    "int6_wo": ("int6_group", None, None),
    "int7_wo": ("int7_group", None, None),
    "int8_wo": ("int8_group", None, None),
}
GROUP_SIZES = (32, 64, 128)

# Spellings of MX formats in version 0.8: (pattern, replacement).
# "w_mx_fp4_a_mx_fp6e2m3_per_group_sym" is "w_mxfp4_a_mxfp6_e2m3".
_SPELLINGS = (
    (r"mx_", "mx"),
    (r"fp6e", "fp6_e"),
    (r"_(per_group|per_tensor|static|dyn|sym)(?=_|$)", ""),
)

# Spellings of other tools: W8A8_FP8, int4wo, and 4bit.
_OTHER_NAMES = {"w8a8_fp8": "ptpc_fp8", "float8dq": "ptpc_fp8", "int8dq": "ptpc_int8"}
_WEIGHT_ONLY = re.compile(r"^(u?int\d|fp8)[-_]?wo\b(?!_).*")
_BITS = re.compile(r"(?:nf|bnb|q|w|int)?[-_ ]?([2-8])[-_ ]?(?:bits?|b)?")

# Names of compressed-tensors, in lower case -> name of the same scheme here.
ALIASES = {
    "w4a16": "w_int4_per_group_sym",
    "w4a16_asym": "w_uint4_per_group_asym",
    "w8a16": "w_int8_per_group_sym",
    "w7a16": "int7_wo_128",
    "w6a16": "int6_wo_128",
    "w5a16": "int5_wo_128",
    "w3a16": "int3_wo_128",
    "w2a16": "int2_wo_128",
    "w8a8": "ptpc_int8",
    "w4a8": "w_int4_per_group_a_int8_per_token_dynamic",
    "w4afp8": "w_int4_per_group_a_fp8_per_token_dynamic",
    "fp8_dynamic": "ptpc_fp8",
    "mxfp4a16": "mxfp4_weight_only",
    "mxfp6a16": "w_mxfp6_e2m3",
    "mxfp8a16": "w_mxfp8",
    "nvfp4a16": "nvfp4_weight_only",
}

KV_CACHE_SCHEMES: dict[str, str] = {
    "fp8": "fp8",
    "fp8_dynamic": "fp8_dynamic",
    "int8_per_tensor_static": "int8",
    "int8_per_tensor_dynamic": "int8_dynamic",
    "int8_per_token": "int8_token",
    "uint4": "uint4_token",
    "uint4_per_group": "uint4_group_dynamic@32",
    "mxfp8": "mxfp8_dynamic",
    "mxfp6_e2m3": "mxfp6_e2m3_dynamic",
    "mxfp6_e3m2": "mxfp6_e3m2_dynamic",
    "mxfp4": "mxfp4_dynamic",
    "fp6e2m3_per_group": "fp6_e2m3_dynamic",
    "fp6e3m2_per_group": "fp6_e3m2_dynamic",
    "fp4_per_group": "fp4_group_dynamic",
    "fp8_per_head": "fp8_head",
    "int8_per_head": "int8_head",
    "int8_per_token_head": "int8_token_head",
    "int4_per_head": "int4_head",
    "int4_per_token_head": "int4_token_head",
    "fp4_per_head": "fp4_head",
}


def scheme_names() -> list[str]:
    """Return the names of all schemes."""
    return [*_SCHEMES, *(f"{prefix}_{size}" for prefix in _GROUPED for size in GROUP_SIZES)]


def scheme(name: str, group_size: int = GROUP_SIZE) -> QuantizationConfig:
    """Return the layer configuration of a scheme.

    Args:
        name: Name of the scheme, in any case. A number at its end is the group size. Spellings of
            version 0.8, such as ``w_mx_fp4_per_group_sym``, and ``ALIASES`` are known too.
        group_size: Elements per group, for schemes that do not fix it.

    Raises:
        ValueError: No scheme has that name; the message names the nearest.
    """
    known = ALIASES.get(name.lower(), name.lower())
    prefix, _, size = known.rpartition("_")
    if prefix in _GROUPED and size.isdecimal():
        return _layer(_GROUPED[prefix], int(size))
    row = _SCHEMES.get(_respelled(known))
    if row is None:
        near = similar_scheme(name, scheme_names())
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(
            f"quant_scheme: {name!r} is unknown.{hint} 'quark schemes --all' and "
            "LLMTemplate.get_supported_schemes() list all names."
        )
    return _layer(row, group_size)


def similar_scheme(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to an unknown one, or None.

    The beginning of a name gives its largest group: ``int4_wo_128`` for ``int4`` and ``int4_wo``.
    So do names of other tools that tell bits alone: ``4bit``, ``q4``, ``nf4``, ``int4wo``. Those of
    ModelOpt are ``NVFP4_DEFAULT_CFG`` and the like. A known name may be the beginning: ``fp8`` for
    ``fp8_e4m3``.

    Args:
        name: The unknown name.
        names: Known names.
    """
    names, name = list(names), name.lower().removesuffix("_cfg").removesuffix("_default")
    if (name := _OTHER_NAMES.get(name, name)) in names:
        return name
    name = _WEIGHT_ONLY.sub(r"\1_wo", name)
    if bits := _BITS.fullmatch(name):
        name = f"int{bits[1]}"
    stem = re.escape(name.removesuffix("_wo"))
    of_weights = [known for known in names if re.fullmatch(rf"{stem}_wo(_\d+)?", known)]
    is_cut = any(known.startswith(name) for known in names)
    starts = [known for known in names if name.startswith(f"{known.lower()}_") and not is_cut]
    return next(iter(of_weights[-1:] or starts[:1] or nearest(name, names, 1)), None)


def _respelled(name: str) -> str:
    if name.startswith("w_mx"):
        for pattern, replacement in _SPELLINGS:
            name = re.sub(pattern, replacement, name)
    return name


def kv_cache_scheme(name: str) -> QuantizationSpec:
    """Return the specification of a scheme of the key-value cache.

    Args:
        name: Name of the scheme, one of ``KV_CACHE_SCHEMES``.

    Raises:
        ValueError: No scheme has that name; the message names the nearest.
    """
    return _spec(KV_CACHE_SCHEMES[one_of(name, KV_CACHE_SCHEMES, "kv_cache_scheme")], GROUP_SIZE)


def _layer(row: _Row, group_size: int) -> QuantizationConfig:
    weight, inputs, outputs = (None if n is None else _spec(n, group_size) for n in row)
    return QuantizationConfig(weight=weight, input_tensors=inputs, output_tensors=outputs)


def _spec(name: str, group_size: int) -> QuantizationSpec:
    name, _, own_size = name.partition("@")
    group_size = int(own_size or group_size)
    if name in BLOCK_SCHEMES:
        return BLOCK_SCHEMES[name].spec()
    if name in _HELPERS:
        helper, arguments = _HELPERS[name]
        made = SPEC_CLASSES[helper]
        given = {"ch_axis": -1, "group_size": group_size, **arguments}
        taken = {f.name for f in fields(made)} & given.keys()  # type: ignore[arg-type]
        return made(**{key: given[key] for key in taken}).to_quantization_spec()
    if name in _STAGES:
        first, second, is_scale_quant = _STAGES[name]
        stages = [_spec(first, group_size), _spec(second, group_size)]
        stages[1] = stages[1].changed(is_scale_quant=is_scale_quant)
        return QuantizationSpec.of_stages(stages)
    dtype, granularity, symmetric, dynamic = _TENSORS[name]
    if not granularity:
        return QuantizationSpec(dtype)  # type: ignore[arg-type]
    blocks: dict[str, Any] = {"qscheme": granularity}
    if granularity == "per_token":
        blocks = {"qscheme": "per_channel", "ch_axis": 1}
    elif granularity == "per_channel":
        blocks["ch_axis"] = 0
    elif granularity == "per_group":
        blocks |= {"ch_axis": -1, "group_size": group_size}
    return QuantizationSpec(
        dtype,  # type: ignore[arg-type]
        observer_cls=_OBSERVERS.get(name),
        symmetric=symmetric,
        is_dynamic=dynamic,
        scale_type="float",  # type: ignore[arg-type]
        round_method="half_even",  # type: ignore[arg-type]
        signed_scales=name.endswith("_signed"),
        **blocks,
    )
