"""Sections of ``quant_method`` "auto-round", in terms of the format whose tensors the files hold.

auto-round stores the tensors of AutoGPTQ, gptqmodel, AutoAWQ or compressed-tensors, and names which
in ``packing_format``. ``extra_config`` has the options of single layers, by name or by regular
expression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

AUTO_ROUND = "auto-round"
# packing_format -> quant_method and checkpoint_format of integers.
_INTEGERS = {
    "auto_round:auto_gptq": ("gptq", "gptq"),
    "auto_round": ("gptq", "gptq_v2"),
    "auto_round:gptqmodel": ("gptq", "gptq_v2"),
    "auto_round:auto_awq": ("awq", None),
}
_FLOATS = "auto_round:llm_compressor"
# data_type, bits -> format of compressed-tensors, and arguments of its weights and inputs.
_MX: dict[str, Any] = {"group_size": 32, "scale_dtype": "torch.uint8", "strategy": "group"}
_NV: dict[str, Any] = {
    **{"group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group"}
}
_FLOAT_FORMATS: dict[tuple[str, int], tuple[str, dict[str, Any]]] = {
    ("mx_fp", 4): ("mxfp4-pack-quantized", _MX),
    ("mx_fp", 8): ("mxfp8-quantized", _MX),
    ("nv_fp", 4): ("nvfp4-pack-quantized", _NV),
}
# act_data_type -> arguments of inputs: whether compressed-tensors calls them dynamic, and how
# shared exponents are rounded, for which compressed-tensors has no name.
_INPUTS: dict[str, dict[str, Any]] = {
    "mx_fp": {"dynamic": True, "scale_calculation_mode": "floor"},
    "nv_fp4_with_static_gs": {"dynamic": "local"},
}
_ADVICE = "Write the model with auto-round in the format 'llm_compressor' or 'auto_gptq'."
_IN_FLOAT = 16  # bits of a layer that is not quantized


def read_auto_round(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section of the format whose tensors auto-round stored.

    A section with a packing that no format here reads is returned unchanged.

    Args:
        section: ``quantization_config`` with ``quant_method`` "auto-round".

    Raises:
        ValueError: A value is of a wrong kind, or a layer has options that its packing cannot hold.
    """
    try:
        return _translated(section)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"quant_method={AUTO_ROUND!r}: quantization_config is malformed ({error}). Copy "
            "config.json from the original checkpoint again."
        ) from None


def _translated(section: Mapping[str, Any]) -> dict[str, Any]:
    packing, data_type = section.get("packing_format"), section.get("data_type", "int")
    if packing in _INTEGERS and data_type == "int" and _has_float_inputs(section):
        method, checkpoint_format = _INTEGERS[packing]
        return _awq(section) if method == "awq" else _gptq(section, checkpoint_format)
    if packing == _FLOATS and (data_type, section.get("bits")) in _FLOAT_FORMATS:
        return _compressed_tensors(section)
    return dict(section)


def _has_float_inputs(options: Mapping[str, Any]) -> bool:
    bits = options.get("act_bits")
    return bits is None or bits >= _IN_FLOAT


def _layers(section: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a regular expression and the options of single layers, full names first.

    Raises:
        ValueError: ``extra_config`` is malformed.
    """
    extra = section.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(value, dict) for value in extra.values()):
        raise ValueError(
            f"quant_method={AUTO_ROUND!r}: extra_config is not an object with an object of options "
            "for each layer."
        )
    usual = {key: value for key, value in section.items() if key != "extra_config"}
    for name in sorted(extra, key=_is_expression):
        expression = _from_start(name) if _is_expression(name) else f"^{re.escape(name)}$"
        yield expression, {**usual, **extra[name]}


def _is_expression(name: str) -> bool:
    return re.search(r"\.\*|[\^$|()\[\]?+]", name) is not None


def _from_start(expression: str) -> str:
    """Return an expression that finds from the start of a name what another finds inside."""
    return expression if expression.startswith(("^", ".*")) else f".*{expression}"


def _gptq(section: Mapping[str, Any], checkpoint_format: str | None) -> dict[str, Any]:
    dynamic: dict[str, Any] = {}
    for expression, options in _layers(section):
        if options.get("bits", _IN_FLOAT) >= _IN_FLOAT:
            dynamic[f"-:{expression}"] = {}
        elif options.get("data_type", "int") != "int" or not _has_float_inputs(options):
            raise ValueError(_refusal(expression, options, section))
        else:
            dynamic[f"+:{expression}"] = {
                key: options[key] for key in ("bits", "group_size", "sym") if key in options
            }
    kept = {key: section[key] for key in ("bits", "group_size", "sym") if key in section}
    given = {"checkpoint_format": checkpoint_format, "dynamic": dynamic, "quant_method": "gptq"}
    return {**kept, **given}


def _awq(section: Mapping[str, Any]) -> dict[str, Any]:
    names = [] if "lm_head" in (section.get("extra_config") or {}) else ["lm_head"]
    for expression, options in _layers(section):
        in_float = options.get("bits", _IN_FLOAT) >= _IN_FLOAT
        if in_float and expression.startswith("^"):
            names.append(expression[1:-1].replace("\\", ""))
        elif in_float or any(options.get(k) != section.get(k) for k in ("bits", "group_size")):
            raise ValueError(_refusal(expression, options, section))
    kept = {key: section[key] for key in ("bits", "group_size") if key in section}
    given = {"version": "gemm", "zero_point": not section.get("sym", True)}
    return {**kept, **given, "modules_to_not_convert": names, "quant_method": "awq"}


def _compressed_tensors(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups of compressed-tensors: one for each layer with options, one for the others."""
    ignore, groups = ["lm_head"], []
    for expression, options in _layers(section):
        if options.get("bits", _IN_FLOAT) >= _IN_FLOAT:
            ignore.append(f"re:{expression}")
        else:
            groups.append({"targets": [f"re:{expression}"], **_group(expression, options, section)})
    blocks = section.get("block_name_to_quantize") or []
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    targets = [f"re:^{re.escape(block)}\\..*$" for block in blocks] or ["Linear"]
    groups.append({"targets": targets, **_group("", section, section)})
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "format": "mixed-precision",
        "ignore": ignore,
        "quant_method": "compressed-tensors",
    }


def _group(
    expression: str, options: Mapping[str, Any], section: Mapping[str, Any]
) -> dict[str, Any]:
    """Return format, weights and inputs of layers in a float format."""
    kind = (options.get("data_type", ""), options.get("bits", 0))
    rounding = _INPUTS.get(options.get("act_data_type", ""))
    known = (
        kind in _FLOAT_FORMATS
        and options.get("group_size") == (_FLOAT_FORMATS[kind][1]["group_size"])
    )
    if not known or not (_has_float_inputs(options) or rounding):
        raise ValueError(_refusal(expression, options, section))
    name, form = _FLOAT_FORMATS[kind]
    weights = {**form, "dynamic": False, "num_bits": kind[1], "symmetric": True, "type": "float"}
    inputs = {**weights, **(rounding or {}), "num_bits": options.get("act_bits")}
    return {
        "format": name,
        "input_activations": None if _has_float_inputs(options) else inputs,
        "weights": weights,
    }


def packing_refusal(section: Mapping[str, Any]) -> str:
    """Return the message for a section that ``read_auto_round`` returned unchanged."""
    names = ("packing_format", "data_type", "bits", "act_bits", "act_data_type")
    shown = ", ".join(f"{name}={section[name]!r}" for name in names if name in section)
    kinds = ", ".join(f"{name} {bits}" for name, bits in _FLOAT_FORMATS)
    return (
        f"quant_method={AUTO_ROUND!r} with {shown or 'no packing_format'} is not read (read: "
        f"integers with inputs in float in {', '.join(_INTEGERS)}; {kinds} in {_FLOATS}). "
        f"{_ADVICE}"
    )


def _refusal(expression: str, options: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    """Return the message for options that are not read."""
    names = ("bits", "group_size", "sym", "data_type", "act_bits", "act_data_type")
    shown = ", ".join(f"{name}={options[name]!r}" for name in names if name in options)
    layers = f"layers {expression!r}" if expression else "the layers"
    return (
        f"quant_method={AUTO_ROUND!r}: {layers} with {shown} are not supported in "
        f"packing_format={section.get('packing_format')!r}. {_ADVICE}"
    )
