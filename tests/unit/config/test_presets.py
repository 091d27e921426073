"""Named schemes say what their names say."""

import re

import pytest

from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.presets import (
    GROUP_SIZES,
    KV_CACHE_SCHEMES,
    kv_cache_scheme,
    scheme,
    scheme_names,
)
from quark.torch.quantization.config.type import QSchemeType

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
# Names that say less than there is.
HAS_MORE = {"w_fp8_per_channel_sym"}


def described(spec):
    return spec and (spec.dtype.name, spec.qscheme.name, spec.symmetric, bool(spec.is_dynamic))


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
    assert not layer.weight.is_dynamic
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


@pytest.mark.parametrize("name", EARLIER)
def test_earlier_names_spell_the_scheme(name):
    """Parse ``w_<format>[_granularity][_a_<format>[_granularity]][_o_<format>][_sym|_asym]…``."""
    layer = scheme(name)
    formats = dict(re.findall(r"(?:^|_)([wao])_([a-z]+\d+)", name))
    tensors = {"w": layer.weight, "a": layer.input_tensors, "o": layer.output_tensors}
    for letter, spec in tensors.items():
        if letter in formats:
            assert spec.dtype.name.removesuffix("_e4m3") == formats[letter]
        else:
            assert spec is None or name in HAS_MORE
    weight = name.split("_a_")[0] if "per_" in name.split("_a_")[0] else name
    granularity = re.search(r"per_(tensor|channel|group)", weight)
    if granularity:
        assert layer.weight.qscheme.name == granularity[0]
    if name.endswith(("_sym", "_asym")):
        assert layer.weight.symmetric is name.endswith("_sym")
    inputs = layer.input_tensors
    assert bool(inputs and inputs.is_dynamic) is name.endswith("_dynamic")
    if "per_token" in name:
        assert inputs.qscheme is QSchemeType.per_channel and inputs.is_dynamic


@pytest.mark.parametrize("name", [n for n in EARLIER if "per_group" in n])
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
