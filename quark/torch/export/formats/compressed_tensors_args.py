"""QuantizationArgs and QuantizationScheme of compressed-tensors, to specifications and back.

QuantizationArgs describe one tensor, a QuantizationScheme the weight and the input of a layer.
"""

from __future__ import annotations

from typing import Any

from quark.torch.export.formats.layer_checks import integer_weight_problem
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.config.spec import MX_BLOCK, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

NVFP4_BLOCK = 16
PER = QSchemeType
PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
# Kind of number -> format of a weight, and the kinds that inputs may have.
_FLOAT_FORMATS = {
    "float": FLOAT,
    "mxfp4": f"mxfp4-{PACKED}",
    "mxfp6": f"mxfp6-{PACKED}",
    "mxfp8": "mxfp8-quantized",
    "nvfp4": f"nvfp4-{PACKED}",
}
_INPUTS = {
    "float": ("float",),
    "mxfp4": ("mxfp4", "mxfp8"),
    "mxfp6": ("mxfp6", "mxfp8"),
    "mxfp8": ("mxfp8",),
    "nvfp4": ("nvfp4",),
}
_MX_ELEMENTS = {4: Dtype.fp4, 6: Dtype.fp6_e2m3, 8: Dtype.fp8_e4m3}  # by their bits
_MX_KINDS = {element.value: f"mxfp{bits}" for bits, element in _MX_ELEMENTS.items()}
_MX_SCALES = ("torch.uint8", "uint8")  # types of stored exponents
# (type, bits) of a key-value cache -> its format.
_CACHES = {
    ("float", 8): Dtype.fp8_e4m3,
    ("float", 4): Dtype.fp4,
    ("int", 8): Dtype.int8,
    ("int", 4): Dtype.int4,
}
# What QuantizationArgs have by default.
_USUAL = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
_STRATEGIES = {PER.per_tensor: "tensor", PER.per_channel: "channel", PER.per_block: "block"}


def format_name(config: QuantizationConfig) -> str | None:
    """Return the compressed-tensors format that can hold a layer, or None."""
    weight, inputs = config.weight, config.input_tensors
    kind = None if weight is None else _number_kind(weight)
    input_kind = None if inputs is None else _input_number_kind(inputs)
    if weight is None or kind is None or (inputs is not None and input_kind is None):
        return None
    if weight.scheme.qscheme is PER.per_channel and weight.scheme.axis not in (0, -2):
        return None
    if kind == "int":
        return _integer_format(weight, input_kind)
    return _FLOAT_FORMATS[kind] if input_kind in (None, *_INPUTS[kind]) else None


def _integer_format(weight: QuantizationSpec, input_kind: str | None) -> str | None:
    """Return the format of an integer weight, or None.

    Signed codes beside integer inputs are stored a byte each, all others in words.
    """
    scheme, bits = weight.scheme, weight.fmt.bits
    if input_kind == "int" and weight.fmt.signed and scheme.symmetric:
        in_rows = scheme.axis in (-1, 1) or scheme.qscheme is not PER.per_group
        return INT if in_rows and scheme.qscheme is not PER.per_block else None
    packs = input_kind is None or (input_kind in ("int", "float") and bits < 8)
    return PACKED if packs and not integer_weight_problem(weight, range(2, 9)) else None


def stored_format(weight: QuantizationSpec) -> str | None:
    """Return the format in which a weight that was read is stored, or None.

    Inputs do not matter. Codes in bytes are read as signed integers, codes in words as unsigned
    ones (``args_to_spec``).
    """
    if _number_kind(weight) == "int" and weight.fmt.signed:
        return _integer_format(weight, "int")
    return format_name(QuantizationConfig(weight=weight))


def check_group(group: dict[str, Any], layer: QuantizationConfig, fmt: str | None) -> None:
    """Check that layers of a group can be read.

    Args:
        group: The group of ``config_groups``.
        layer: How its layers are quantized.
        fmt: Format of their weights.

    Raises:
        ValueError: They cannot; the message names the part.
    """
    part = None
    if group.get("output_activations"):
        part = "output_activations"
    elif layer.weight is None or stored_format(layer.weight) != fmt:
        part = "weights"
    elif layer.input_tensors is not None and _input_number_kind(layer.input_tensors) is None:
        part = "input_activations"
    if part is not None:
        raise ValueError(_not_supported(part, group.get(part) or {}, f" in the format {fmt!r}"))


def _not_supported(part: str, args: dict[str, Any], place: str = "") -> str:
    """Return a message about a part of a group that is not supported."""
    given = {name: args.get(name, _USUAL.get(name)) for name in (*_USUAL, "group_size")}
    fields = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return (
        f"compressed-tensors: {part} with {fields}{place} are not supported. Load the checkpoint "
        "with compressed-tensors."
    )


def layer_scheme(config: QuantizationConfig) -> dict[str, Any]:
    """Return the QuantizationScheme of a layer, without targets."""
    assert config.weight is not None
    inputs = config.input_tensors
    return {
        "format": format_name(config),
        "input_activations": None if inputs is None else spec_to_args(inputs, is_input=True),
        "output_activations": None,
        "weights": spec_to_args(config.weight, is_input=False),
    }


def _number_kind(spec: QuantizationSpec) -> str | None:
    """Return "int", "float" (fp8_e4m3) or a key of ``_INPUTS``, None for other number formats."""
    scheme, second = spec.scheme, spec.second_stage
    in_rows = scheme.axis in (-1, 1)
    if scheme.scale == E8M0:
        is_mx = in_rows and scheme.group == MX_BLOCK and second is None
        return _MX_KINDS.get(spec.fmt) if is_mx else None
    if spec.dtype is Dtype.fp4 and second is not None and second.is_scale_quant and in_rows:
        is_nvfp4 = scheme.group == NVFP4_BLOCK and second.dtype is Dtype.fp8_e4m3
        return "nvfp4" if is_nvfp4 else None
    if second is not None or scheme.float_zero_point:
        return None
    if spec.dtype is Dtype.fp8_e4m3:
        grouped = scheme.qscheme is PER.per_group and not spec.is_dynamic
        return None if grouped else "float"
    return "int" if scheme.has_zero_point and spec.fmt.bits <= 8 else None


def _input_number_kind(spec: QuantizationSpec) -> str | None:
    """Return ``_number_kind`` of an input, None also for what QuantizationArgs cannot express."""
    kind, per_channel = _number_kind(spec), spec.scheme.qscheme is PER.per_channel
    if (kind == "int" and not spec.fmt.signed) or (per_channel and not spec.is_dynamic):
        return None
    return kind


def spec_to_args(spec: QuantizationSpec, is_input: bool) -> dict[str, Any]:
    """Return the QuantizationArgs of a tensor."""
    scheme, kind = spec.scheme, _number_kind(spec)
    args: dict[str, Any] = {
        "dynamic": bool(is_input and spec.is_dynamic),
        "group_size": None,
        "num_bits": spec.fmt.bits,
        "symmetric": scheme.symmetric,
        "type": "int" if kind == "int" else "float",
    }
    if scheme.qscheme is PER.per_group and scheme.group > 0:
        args |= {"strategy": "group", "group_size": scheme.group}
    else:
        args["strategy"] = "token" if scheme.per_token and is_input else _strategy(spec)
    if scheme.qscheme is PER.per_block:
        args["block_structure"] = list(scheme.block or ())
    if scheme.scale == E8M0:
        args["scale_dtype"] = "torch.uint8"
    if kind == "nvfp4":
        args |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        args["dynamic"] = "local" if is_input else False
    return args


def _strategy(spec: QuantizationSpec) -> str:
    """Return the strategy of scales that are neither per group nor per token."""
    return _STRATEGIES.get(spec.scheme.qscheme, "channel")


def args_to_spec(
    args: dict[str, Any] | None, is_input: bool, fmt: str | None
) -> QuantizationSpec | None:
    """Return the specification that QuantizationArgs describe, None for None.

    Args:
        args: QuantizationArgs of a tensor.
        is_input: Whether the tensor is an activation.
        fmt: Format of the group.

    Raises:
        ValueError: The type or the strategy is not supported.
    """
    if args is None:
        return None
    bits, is_int = args.get("num_bits", 8), args.get("type", "int") == "int"
    strategy, group = args.get("strategy") or "tensor", args.get("group_size")
    if (bits, is_int, strategy, group) == (4, False, "tensor_group", NVFP4_BLOCK):
        return _nvfp4_spec(is_input)
    is_mx = bits in (4, 6) or (bits == 8 and args.get("scale_dtype") in _MX_SCALES)
    if is_mx and not is_int and (strategy, group) == ("group", MX_BLOCK):
        return _mx_spec(bits, bool(args.get("dynamic")), args.get("scale_calculation_mode"))
    name = f"int{bits}" if is_int else f"fp{bits}_e4m3"
    if is_int and not is_input and fmt == PACKED:
        name = f"uint{bits}"
    granularity = {
        "tensor": {"qscheme": PER.per_tensor},
        "channel": {"qscheme": PER.per_channel, "ch_axis": 0},
        "token": {"qscheme": PER.per_channel, "ch_axis": 1},
        "group": {"qscheme": PER.per_group, "ch_axis": -1, "group_size": group},
        "block": {"qscheme": PER.per_block, "block_size": args.get("block_structure")},
    }
    is_known = name in Dtype.__members__ and strategy in granularity and type(bits) is int
    if not is_known or args.get("dynamic") not in (True, False, None):
        raise ValueError(_not_supported("input_activations" if is_input else "weights", args))
    return QuantizationSpec(
        Dtype[name],
        is_dynamic=bool(args.get("dynamic")),
        symmetric=bool(args.get("symmetric", True)),
        **granularity[strategy],  # type: ignore[arg-type]
    )


def cache_args(spec: QuantizationSpec) -> dict[str, Any] | None:
    """Return the QuantizationArgs of keys, values or queries with static scales, None for others.

    There is one scale, or one per head, without zero points.
    """
    kind = next((kind for kind, dtype in _CACHES.items() if spec.dtype is dtype), None)
    if kind is None or spec.is_dynamic or not spec.scheme.symmetric or spec.second_stage:
        return None
    is_per_head = spec.scheme.qscheme is PER.per_head
    if not is_per_head and spec.scheme.qscheme is not PER.per_tensor:
        return None
    return {
        "dynamic": False,
        "group_size": None,
        "num_bits": kind[1],
        "strategy": "attn_head" if is_per_head else "tensor",
        "symmetric": True,
        "type": kind[0],
    }


def args_to_cache(
    args: dict[str, Any] | None, name: str = "kv_cache_scheme"
) -> QuantizationSpec | None:
    """Return the specification of a key-value cache, None for None: the inverse of ``cache_args``.

    Args:
        args: QuantizationArgs of the cache, or of attention.
        name: Where they are, for the error.

    Raises:
        ValueError: Such a cache is not supported.
    """
    if args is None:
        return None
    for dtype in _CACHES.values() if isinstance(args, dict) else ():
        for qscheme in (PER.per_tensor, PER.per_head):
            spec = QuantizationSpec(dtype, qscheme=qscheme, is_dynamic=False, symmetric=True)
            known = cache_args(spec)
            if known and all(args.get(k, _USUAL.get(k)) == v for k, v in known.items()):
                return spec
    raise ValueError(
        f"compressed-tensors: {name}={args} is not supported, only static fp8, fp4, int8 and int4, "
        "per tensor or per head, without zero points."
    )


def _mx_spec(bits: int, is_dynamic: bool, mode: str | None) -> QuantizationSpec:
    """Return the specification of blocks with shared exponents, which are rounded by a mode."""
    return QuantizationSpec(
        _MX_ELEMENTS[bits],
        qscheme=PER.per_group,
        ch_axis=-1,
        group_size=MX_BLOCK,
        scale_format="e8m0",
        scale_calculation_mode=mode,
        is_dynamic=is_dynamic,
    )


def _nvfp4_spec(is_input: bool) -> QuantizationSpec:
    """Return the specification of NVFP4."""
    return QuantizationSpec(
        Dtype.fp4,
        qscheme=PER.per_group,
        ch_axis=-1,
        group_size=NVFP4_BLOCK,
        is_dynamic=is_input,
        second_stage=QuantizationSpec(
            Dtype.fp8_e4m3, qscheme=PER.per_tensor, is_dynamic=False, is_scale_quant=True
        ),
    )
