"""Named schemes say what their names say."""

import json
import re

import pytest
import torch
from torch import nn

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scale_formats import E5M3, E8M0, FLOAT32, ScaleFormat
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import (
    GROUP_SIZES,
    KV_CACHE_SCHEMES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)
from quark.torch.quantization.config.type import QSchemeType

MXFP4 = ("fp4", "per_group", True, False)
MXFP6_E2M3 = ("fp6_e2m3", "per_group", True, False)
MXFP6_E3M2 = ("fp6_e3m2", "per_group", True, False)
MXFP8 = ("fp8_e4m3", "per_group", True, False)
FP8 = ("fp8_e4m3", "per_tensor", True, False)


def dynamic(described):
    return (*described[:3], True)


# Names of current versions: what is documented of weight and input. A tensor is
# (format, granularity, symmetric, dynamic).
CURRENT = {
    "int8": (("int8", "per_tensor", True, False), ("int8", "per_tensor", True, False)),
    "int8_wo": (("int8", "per_channel", True, False), None),
    "ptpc_int8": (("int8", "per_channel", True, False), ("int8", "per_channel", True, True)),
    "fp8": (("fp8_e4m3", "per_tensor", True, False), ("fp8_e4m3", "per_tensor", True, False)),
    "fp8_wo": (("fp8_e4m3", "per_channel", True, False), None),
    "ptpc_fp8": (
        ("fp8_e4m3", "per_channel", True, False),
        ("fp8_e4m3", "per_channel", True, True),
    ),
    "int4_wo_per_channel": (("int4", "per_channel", True, False), None),
    "uint4_wo_per_channel": (("uint4", "per_channel", False, False), None),
    "int3_wo_per_channel": (("int3", "per_channel", True, False), None),
    "mxfp4": (MXFP4, dynamic(MXFP4)),
    "mxfp4_weight_only": (MXFP4, None),
    "mxfp6_e3m2": (MXFP6_E3M2, dynamic(MXFP6_E3M2)),
    "mxfp6_e2m3": (MXFP6_E2M3, dynamic(MXFP6_E2M3)),
    "mxfp4_mxfp6_e2m3": (MXFP4, dynamic(MXFP6_E2M3)),
    "mxfp4_fp8": (MXFP4, FP8),
    "mxfp8": (MXFP8, dynamic(MXFP8)),
    "nvfp4": (MXFP4, dynamic(MXFP4)),
    "nvfp4_weight_only": (MXFP4, None),
    "fp4_block16_scale_e4m3": (MXFP4, dynamic(MXFP4)),
    "amdfp4": (MXFP4, dynamic(MXFP4)),
    "amdfp4_g32": (MXFP4, dynamic(MXFP4)),
    "amdfp4_global16": (MXFP4, dynamic(MXFP4)),
    "amdfp4_global32": (MXFP4, dynamic(MXFP4)),
    "int4_fp8": (FP8, FP8),
    "mx6": (("mx6", "per_group", True, True), ("mx6", "per_group", True, True)),
    "mx9": (("mx9", "per_group", True, True), ("mx9", "per_group", True, True)),
    "bfp16": (("bfp16", "per_group", True, True), ("bfp16", "per_group", True, True)),
}
GROUPED = {
    "int2_wo": ("int2", True, False),
    "int3_wo": ("int3", True, False),
    "int4_wo": ("int4", True, False),
    "int4_wa": ("int4", True, True),
    "uint4_wo": ("uint4", False, False),
    "int5_wo": ("int5", True, False),
    "int6_wo": ("int6", True, False),
    "int7_wo": ("int7", True, False),
    "int8_wo": ("int8", True, False),
    **{f"int{bits}_wo_signed": (f"int{bits}", True, False) for bits in (2, 3, 4)},
    "int4_wa_signed": ("int4", True, True),
}
EARLIER = [name for name in scheme_names() if name.startswith("w_")]
# Formats whose helper is dynamic for weights as well: a parameter has a settled scale all the same.
DYNAMIC = ("mx", "mx6", "mx9", "bfp16")
# Names that say less than there is.
HAS_MORE = {
    "w_fp8_per_channel_sym",
    *(f"w_{d}_per_tensor_{o}" for d in ("int8", "uint8") for o in ("mse", "percentile")),
}


def described(spec):
    if spec is None:
        return None
    scheme = spec.scheme
    return (spec.dtype.name, scheme.qscheme.name, scheme.symmetric, bool(spec.is_dynamic))


# Scheme -> elements of a group and scales of the weight, where the caller says 128.
E4M3_TWO_LEVEL = ScaleFormat("float8_e4m3fn", Dtype.fp8_e4m3.value, two_level=True)
E5M3_TWO_LEVEL = ScaleFormat("uint8", Dtype.fp8_e5m3.value, two_level=True)
BLOCKS = {
    "mxfp4": (32, E8M0),
    "mxfp4_weight_only": (32, E8M0),
    "mxfp6_e3m2": (32, E8M0),
    "mxfp6_e2m3": (32, E8M0),
    "mxfp4_mxfp6_e2m3": (32, E8M0),
    "mxfp4_fp8": (32, E8M0),
    "mxfp8": (32, E8M0),
    "nvfp4": (16, E4M3_TWO_LEVEL),
    "nvfp4_weight_only": (16, E4M3_TWO_LEVEL),
    "amdfp4": (16, E5M3),
    "amdfp4_g32": (32, E5M3),
    "fp4_block16_scale_e4m3": (16, E4M3_TWO_LEVEL),
    "amdfp4_global16": (16, E5M3_TWO_LEVEL),
    "amdfp4_global32": (32, E5M3_TWO_LEVEL),
    "w_fp4_per_group": (128, FLOAT32),
    "w_fp6_e2m3_per_group_a_fp6_e2m3_per_group": (128, FLOAT32),
    "w_mxint8": (32, E8M0),
    "w_mxfp4_diffs": (32, E8M0),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_their_scales(name):
    layer = scheme(name, group_size=128)
    made = layer.weight.scheme
    assert (made.group, made.scale) == BLOCKS[name]
    if layer.input_tensors is not None and layer.input_tensors.fmt == layer.weight.fmt:
        made = layer.input_tensors.scheme
        assert (made.group, made.scale) == BLOCKS[name]


@pytest.mark.parametrize(("name", "size"), [("mx6", 16), ("mx9", 16), ("bfp16", 8)])
def test_blocks_of_shared_exponents(name, size):
    assert scheme(name).weight.scheme.group == scheme(name).input_tensors.scheme.group == size


@pytest.mark.parametrize("tensor", ["weight", "input_tensors"])
@pytest.mark.parametrize(
    ("name", "size", "scales"),
    [("nvfp4", 16, "fp8_e4m3"), *((f"amdfp4_global{n}", n, "fp8_e5m3") for n in (16, 32))],
)
def test_scales_are_quantized_again(name, size, scales, tensor):
    first, second = getattr(scheme(name), tensor).stages
    assert (first.dtype.name, first.group_size) == ("fp4", size)
    assert described(second) == (scales, "per_tensor", True, False) and second.is_scale_quant


def test_two_names_of_one_scheme():
    assert scheme("fp4_block16_scale_e4m3") == scheme("nvfp4")


def test_codes_of_int4_fp8_are_quantized_again():
    weight = scheme("int4_fp8").weight
    assert described(weight.stages[0]) == FP8
    assert described(weight.stages[1]) == ("int4", "per_channel", True, False)
    assert weight.quantizes_codes and not weight.stages[1].is_scale_quant


def test_every_name_is_in_a_table():
    grouped = [f"{prefix}_{size}" for prefix in GROUPED for size in (32, 64, 128)]
    others = ["bfloat16", "float16", *BLOCK_SCHEMES]
    assert sorted(scheme_names()) == sorted([*CURRENT, *grouped, *others, *EARLIER])
    assert len(set(scheme_names())) == len(scheme_names())


@pytest.mark.parametrize("name", scheme_names())
def test_scheme_builds(name):
    layer = scheme(name)
    assert isinstance(layer, QuantizationConfig)
    assert layer.weight is not None and layer.bias is None
    assert not layer.weight.for_parameter().is_dynamic
    assert not layer.weight.is_dynamic or layer.weight.fmt.name in DYNAMIC
    assert Config(layer).global_quant_config is layer
    assert scheme(name) == layer and scheme(name).weight is not layer.weight
    assert scheme(name.upper()) == layer


@pytest.mark.parametrize("name", CURRENT)
def test_current_names(name):
    layer = scheme(name)
    assert (described(layer.weight), described(layer.input_tensors)) == CURRENT[name]
    assert layer.output_tensors is None


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("prefix", GROUPED)
def test_names_with_a_group_size(prefix, size):
    dtype, symmetric, with_inputs = GROUPED[prefix]
    layer = scheme(f"{prefix}_{size}")
    assert described(layer.weight) == (dtype, "per_group", symmetric, False)
    assert (layer.weight.group_size, layer.weight.ch_axis) == (size, -1)
    assert layer.weight.signed_scales == prefix.endswith("_signed")
    assert described(layer.input_tensors) == (
        (dtype, "per_group", symmetric, True) if with_inputs else None
    )
    if with_inputs:
        assert layer.input_tensors.group_size == size


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_casts(name):
    layer = scheme(name)
    assert layer.weight.dtype.name == name
    assert layer.weight.qscheme is None
    assert layer.input_tensors is None


# What cannot be static for activations: each block has a scale of its own.
BLOCK_FORMATS = (
    *("bfp16", "fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "mx6"),
    *("mxfp4", "mxfp6", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"),
)
# Names of earlier versions that leave out which 6-bit float is meant, or name an 8-bit one in full.
SHORT = {
    ("w_mxfp4_a_mxfp6", "mxfp6_e2m3"): "mxfp6",
    ("w_fp4_per_group_a_fp8_e4m3_per_group", "fp8"): "fp8_e4m3",
}
# Names that say of the inputs neither that they are dynamic nor per token.
PER_TOKEN = {"w_uint4_a_uint4_per_channel", "w_uint4_per_token_a_int8_per_channel"}


def spelled(spec, name=""):
    """The format of a tensor as names of schemes spell it."""
    element = spec.mx_element_dtype or spec.dtype
    prefix = "mx" if spec.scheme.scale == E8M0 else ""
    word = prefix + element.name.removesuffix("_e4m3")
    return SHORT.get((name, word), word)


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_names_spell_the_scheme(name):
    """Parse ``w_<format>[_granularity][_a_<format>[_granularity]][_o_<format>][_sym|_asym]…``."""
    layer = scheme(name)
    formats = dict(re.findall(r"(?:^|_)([wao])_([a-z]+\d+(?:_e\dm\d)?)", name))
    tensors = {"w": layer.weight, "a": layer.input_tensors, "o": layer.output_tensors}
    for letter, spec in tensors.items():
        if letter in formats:
            assert spelled(spec, name) == formats[letter]
        else:
            assert spec is None or name in HAS_MORE
    weight = name.split("_a_")[0] if "per_" in name.split("_a_")[0] else name
    granularity = re.search(r"per_(tensor|channel|group)", weight)
    if "scale_fp8" in name:
        assert layer.weight.scheme.scale == E4M3_TWO_LEVEL
    if granularity and not layer.weight.fixes_blocks:
        assert layer.weight.qscheme.name == granularity[0]
    if name.endswith(("_sym", "_asym")):
        assert layer.weight.scheme.symmetric is name.endswith("_sym")
    inputs = layer.input_tensors
    if formats.get("a") in BLOCK_FORMATS or name in PER_TOKEN:
        assert inputs.is_dynamic
    else:
        assert bool(inputs and inputs.is_dynamic) is name.endswith("_dynamic")
    if "per_token" in name or name in PER_TOKEN:
        assert inputs.qscheme is QSchemeType.per_channel and inputs.is_dynamic


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize(
    ("method", "observer"),
    [("mse", "PerTensorMSEObserver"), ("percentile", "PerTensorPercentileObserver")],
)
def test_names_of_observers(dtype, method, observer):
    """Weights are searched or cut, the inputs beside them have their minimum and maximum."""
    layer = scheme(f"w_{dtype}_per_tensor_{method}")
    assert layer.weight.observer_cls.__name__ == observer
    assert layer.input_tensors.observer_cls.__name__ == "PerTensorMinMaxObserver"
    assert described(layer.weight) == described(layer.input_tensors)
    assert described(layer.weight) == (dtype, "per_tensor", True, False)


# Names that versions 0.8 and 0.9 documented -> the row each one means.
SPELLINGS = {
    "w_mx_fp8": "w_mxfp8",
    "w_mx_fp8_a_mx_fp8": "w_mxfp8_a_mxfp8",
    "w_mx_fp4_per_group_sym": "w_mxfp4",
    "w_mx_fp6_e2m3_per_group_sym": "w_mxfp6_e2m3",
    "w_mx_fp6_e3m2_per_group_sym": "w_mxfp6_e3m2",
    "w_mx_int8_per_group_sym": "w_mxint8",
    "w_mx_fp4_a_fp8_per_group_sym": "w_mxfp4_a_fp8",
    "w_mx_fp4_a_mx_fp4_per_group_sym": "w_mxfp4_a_mxfp4",
    "w_mx_fp4_a_mx_fp4_dyn_per_group_sym": "w_mxfp4_a_mxfp4",
    "w_mx_fp4_a_mx_fp8_per_group_sym": "w_mxfp4_a_mxfp8",
    "w_mx_fp4_a_mx_fp6e2m3_per_group_sym": "w_mxfp4_a_mxfp6_e2m3",
    "w_mx_fp4_a_mx_fp6e3m2_per_group_sym": "w_mxfp4_a_mxfp6_e3m2",
    "w_mx_fp6e2m3_a_mx_fp6e2m3_per_group_sym": "w_mxfp6_e2m3_a_mxfp6_e2m3",
    "w_mx_fp6e3m2_a_mx_fp6e3m2_per_group_sym": "w_mxfp6_e3m2_a_mxfp6_e3m2",
    "w_mx_fp4_per_group_a_fp8_per_tensor_static_sym": "w_mxfp4_a_fp8",
    "w_mx_fp4_per_group_a_fp8_per_tensor_dynamic_sym": "w_mxfp4_a_fp8_dynamic",
    "w_mx_fp4_a_mx_fp4_sym": "w_mxfp4_a_mxfp4",
    "w_mxfp4_a_mxfp4_sym": "w_mxfp4_a_mxfp4",
    "w_mx_fp4_a_mx_fp6_sym": "w_mxfp4_a_mxfp6",
    "w_mx_fp6_e2m3_sym": "w_mxfp6_e2m3",
    "w_mx_fp6_e3m2_sym": "w_mxfp6_e3m2",
    "w_mx_fp6_e2m3_a_mx_fp6_e2m3": "w_mxfp6_e2m3_a_mxfp6_e2m3",
    "w_mx_fp6_e3m2_a_mx_fp6_e3m2": "w_mxfp6_e3m2_a_mxfp6_e3m2",
    "w_mxfp4_a_fp8_per_group": "w_mxfp4_a_fp8",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_earlier_versions(name):
    assert SPELLINGS[name] in scheme_names() and name not in scheme_names()
    assert scheme(name) == scheme(name.upper()) == scheme(SPELLINGS[name])


@pytest.mark.parametrize("name", [*scheme_names(), *SPELLINGS])
def test_every_scheme_quantizes_a_layer(name, quantize):
    """Through JSON, which brings back the same, to a frozen layer that does about the same."""
    written = json.loads(json.dumps(Config(scheme(name, group_size=32)).to_dict(everything=True)))
    config = Config.from_dict(written)
    assert config.global_quant_config == scheme(name, group_size=32)
    assert json.loads(json.dumps(config.to_dict(everything=True))) == written
    model, x = nn.Sequential(nn.Linear(128, 16)), torch.randn(2, 3, 128)
    with torch.no_grad():
        expected = model(x)
        found = quantize(model, config, [x])(x)
    error = (found - expected).norm() / expected.norm()
    coarsest = min(s.coded.fmt.bits for _, s in config.global_quant_config.specs())
    assert 0 < error < {2: 0.6, 3: 0.3, 4: 0.25, 6: 0.1}.get(coarsest, 0.06)


SIZED = [n for n in EARLIER if "per_group" in n and not scheme(n).weight.fixes_blocks]


@pytest.mark.parametrize("name", SIZED)
def test_group_size_is_of_the_caller_where_the_name_has_none(name):
    for size, layer in ((128, scheme(name)), (64, scheme(name, group_size=64))):
        assert layer.weight.group_size == size
        inputs = layer.input_tensors
        if inputs is not None and inputs.qscheme is QSchemeType.per_group:
            assert inputs.group_size == size
    assert scheme("int4_wo_32", group_size=64).weight.group_size == 32


def test_any_group_size():
    assert scheme("int4_wo_96").weight.group_size == 96
    with pytest.raises(ValueError, match="positive group_size"):
        scheme("int4_wo_0")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("int8_w", "int8_wo"),
        ("int4", "int4_wo_128"),
        ("INT3", "int3_wo_128"),
        ("Q4_K_M", "q4_k"),
        ("w_mx_fp5_sym", None),
        ("fp8_weightonly", None),
        ("int4_wo_128x", "int4_wo_128"),
        ("", None),
    ],
)
def test_unknown_scheme(name, near):
    with pytest.raises(ValueError, match=f"quant_scheme: '{name}' is unknown") as raised:
        scheme(name)
    assert f"Did you mean {near!r}" in str(raised.value) or near is None


CACHES = {
    "fp8": ("fp8_e4m3", "per_tensor", True, False),
    "fp8_dynamic": ("fp8_e4m3", "per_tensor", True, True),
    "int8_per_tensor_static": ("int8", "per_tensor", True, False),
    "int8_per_tensor_dynamic": ("int8", "per_tensor", True, True),
    "int8_per_token": ("int8", "per_channel", True, True),
    "uint4": ("uint4", "per_channel", False, True),
    "uint4_per_group": ("uint4", "per_group", False, True),
    "mxfp8": dynamic(MXFP8),
    "mxfp6_e2m3": dynamic(MXFP6_E2M3),
    "mxfp6_e3m2": dynamic(MXFP6_E3M2),
    "mxfp4": dynamic(MXFP4),
    "fp6e2m3_per_group": dynamic(MXFP6_E2M3),
    "fp6e3m2_per_group": dynamic(MXFP6_E3M2),
    "fp4_per_group": dynamic(MXFP4),
    "fp8_per_head": ("fp8_e4m3", "per_head", True, False),
    "int8_per_head": ("int8", "per_head", True, False),
    "int8_per_token_head": ("int8", "per_group", True, True),
    "int4_per_head": ("int4", "per_head", True, False),
    "int4_per_token_head": ("int4", "per_group", True, True),
    "fp4_per_head": ("fp4", "per_head", True, False),
}


def test_every_cache_scheme_is_in_the_table():
    assert set(KV_CACHE_SCHEMES) == set(CACHES)


@pytest.mark.parametrize("name", CACHES)
def test_cache_scheme(name):
    spec = kv_cache_scheme(name)
    assert described(spec) == CACHES[name]
    assert (spec.scheme.scale == E8M0) is name.startswith("mx")


def test_unknown_cache_scheme():
    with pytest.raises(ValueError, match=r"kv_cache_scheme: 'fp9' is unknown.*'fp8'"):
        kv_cache_scheme("fp9")
