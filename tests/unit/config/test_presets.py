"""Named schemes say what their names say."""

import re

import pytest

from quark.torch.numerics.scale_formats import E4M3, E5M3, E8M0, FLOAT32
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
    "amdfp4": (dynamic(MXFP4), dynamic(MXFP4)),
    "amdfp4_g32": (dynamic(MXFP4), dynamic(MXFP4)),
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
    "int8_wo": ("int8", True, False),
}
EARLIER = [name for name in scheme_names() if name.startswith("w_")]
# Formats whose helper is dynamic for weights as well: a parameter has a settled scale all the same.
DYNAMIC = ("fp4", "mx6", "mx9", "bfp16")
# Names that say less than there is.
HAS_MORE = {"w_fp8_per_channel_sym"}


def described(spec):
    if spec is None:
        return None
    scheme = spec.scheme
    return (spec.dtype.name, scheme.qscheme.name, scheme.symmetric, bool(spec.is_dynamic))


# Scheme -> elements of a group and scales of the weight.
BLOCKS = {
    "mxfp4": (32, E8M0),
    "mxfp4_weight_only": (32, E8M0),
    "mxfp6_e3m2": (32, E8M0),
    "mxfp6_e2m3": (32, E8M0),
    "mxfp4_mxfp6_e2m3": (32, E8M0),
    "mxfp4_fp8": (32, E8M0),
    "mxfp8": (32, E8M0),
    "nvfp4": (16, E4M3),
    "nvfp4_weight_only": (16, E4M3),
    "amdfp4": (16, E5M3),
    "amdfp4_g32": (32, E5M3),
    "w_fp4_per_group": (32, FLOAT32),
    "w_mxint8": (32, E8M0),
    "w_mxfp4_diffs": (32, E8M0),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_and_their_scales(name):
    made = scheme(name, group_size=128).weight.scheme
    assert (made.group, made.scale) == BLOCKS[name]


@pytest.mark.parametrize(("name", "size"), [("mx6", 16), ("mx9", 16), ("bfp16", 8)])
def test_blocks_of_shared_exponents(name, size):
    assert scheme(name).weight.scheme.group == scheme(name).input_tensors.scheme.group == size


@pytest.mark.parametrize("tensor", ["weight", "input_tensors"])
def test_scales_of_nvfp4_are_quantized_again(tensor):
    first, second = getattr(scheme("nvfp4"), tensor).stages
    assert (first.dtype.name, first.group_size) == ("fp4", 16)
    assert described(second) == FP8 and second.is_scale_quant


def test_codes_of_int4_fp8_are_quantized_again():
    weight = scheme("int4_fp8").weight
    assert described(weight.stages[0]) == FP8
    assert described(weight.stages[1]) == ("int4", "per_channel", True, False)
    assert weight.quantizes_codes and not weight.stages[1].is_scale_quant


def test_every_name_is_in_a_table():
    grouped = [f"{prefix}_{size}" for prefix in GROUPED for size in (32, 64, 128)]
    others = ["bfloat16", "float16"]
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
BLOCK_FORMATS = ("bfp16", "fp4", "mx6", "mxfp4", "mxfp6", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8")
# Names of earlier versions that leave out which 6-bit float is meant.
SHORT = {("w_mxfp4_a_mxfp6", "mxfp6_e2m3"): "mxfp6"}


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
        assert layer.weight.scheme.scale == E4M3
    if granularity:
        assert layer.weight.qscheme.name == granularity[0]
    if name.endswith(("_sym", "_asym")):
        assert layer.weight.symmetric is name.endswith("_sym")
    inputs = layer.input_tensors
    if formats.get("a") not in BLOCK_FORMATS:
        assert bool(inputs and inputs.is_dynamic) is name.endswith("_dynamic")
    else:
        assert inputs.is_dynamic
    if "per_token" in name:
        assert inputs.qscheme is QSchemeType.per_channel and inputs.is_dynamic


@pytest.mark.parametrize("name", [n for n in EARLIER if "per_group" in n and "fp4" not in n])
def test_group_size_is_of_the_caller_where_the_name_has_none(name):
    assert scheme(name).weight.group_size == 128
    assert scheme(name, group_size=64).weight.group_size == 64
    assert scheme("int4_wo_32", group_size=64).weight.group_size == 32


def test_any_group_size():
    assert scheme("int4_wo_96").weight.group_size == 96
    with pytest.raises(ValueError, match="positive group_size"):
        scheme("int4_wo_0")


@pytest.mark.parametrize(
    ("name", "near"),
    [("int8_w", "int8_wo"), ("fp8_weightonly", None), ("int4_wo_128x", "int4_wo_128"), ("", None)],
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
}


def test_every_cache_scheme_is_in_the_table():
    assert set(KV_CACHE_SCHEMES) == set(CACHES)


@pytest.mark.parametrize("name", CACHES)
def test_cache_scheme(name):
    assert described(kv_cache_scheme(name)) == CACHES[name]


def test_unknown_cache_scheme():
    with pytest.raises(ValueError, match=r"kv_cache_scheme: 'fp9' is unknown.*'fp8'"):
        kv_cache_scheme("fp9")
