"""Rules on the fields of one specification, and what the arithmetic makes of them."""

import re
from dataclasses import replace

import pytest

from quark.torch.numerics.scale_formats import E4M3, E5M3, E8M0, FLOAT32, POF2, ScaleFormat
from quark.torch.quantization.config import spec as spec_module
from quark.torch.quantization.config.config import QTensorConfig, QuantizationSpec
from quark.torch.quantization.config.qat import QATSpec
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark.torch.quantization.observer.observer import (
    ObserverBase,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
    PlaceholderObserver,
)
from quark.torch.quantization.observer.registry import FOR_INTEGERS, OBSERVERS, observer_class

GROUP = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32}

INT4 = QuantizationSpec("int4", qscheme="per_channel", ch_axis=0)

# Every rule: fields that break it and what is said.
_SUPER_BLOCKS = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "is_dynamic": False}
BROKEN = {
    "signed scales of floats": (
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "signed_scales": True, "is_dynamic": False},
        "signed_scales=True is for symmetric integers",
    ),
    "a choice between 4 and 6 of integers": (
        {"dtype": "int4", "four_over_six": True, **_SUPER_BLOCKS, "is_dynamic": True},
        "four_over_six=True is for dynamic fp4 per group",
    ),
    "super-blocks of floats": (
        {"dtype": "fp4", "scale_format": "uint6x8", **_SUPER_BLOCKS},
        "scale_format='uint6x8' is for groups of integers",
    ),
    "dynamic super-blocks": (
        {"dtype": "int4", "scale_format": "int8x16", **_SUPER_BLOCKS, "is_dynamic": True},
        "scale_format='int8x16' is for static scales of one stage",
    ),
    "super-blocks of integer zero points": (
        {"dtype": "uint4", "scale_format": "uint6x8", **_SUPER_BLOCKS, "symmetric": False},
        "needs zero_point_type='float32', an unsigned dtype",
    ),
    "trained groups of a float": (
        {"dtype": "fp4", **GROUP, "qat_spec": QATSpec(), "is_dynamic": True},
        "trained scales are static and of one stage",
    ),
    "a second stage over integers with zero points": (
        {"dtype": "uint8", "qscheme": "per_tensor", "symmetric": False, "second_stage": INT4},
        "second_stage=int4 cannot quantize its codes: those of floats with scales",
    ),
    "scales in integers": (
        {"dtype": "fp4", **GROUP, "second_stage": replace(INT4, is_scale_quant=True)},
        "second_stage=int4 cannot quantize its scales",
    ),
    "block of zero": (
        {"dtype": "int8", "qscheme": "per_block", "block_size": (0, 16)},
        r"block_size=\(0, 16\): give positive numbers, or -1",
    ),
    "no granularity": ({"dtype": "int8"}, "qscheme is missing: give one of .*per_channel"),
    "no granularity of a float": ({"dtype": "fp8_e4m3"}, "qscheme is missing"),
    "per channel without axis": (
        {"dtype": "int8", "qscheme": "per_channel"},
        "per_channel needs an integer ch_axis, got None",
    ),
    "per group without axis": (
        {"dtype": "int4", "qscheme": "per_group", "group_size": 32},
        "per_group needs an integer ch_axis, got None",
    ),
    "per group without size": (
        {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1},
        "positive group_size, or -1 .* got None",
    ),
    "group of zero": ({"dtype": "int4", **GROUP, "group_size": 0}, "positive group_size.* got 0"),
    "group of -2": ({"dtype": "int4", **GROUP, "group_size": -2}, "positive group_size.* got -2"),
    "float with zero point": (
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": False},
        "no zero point: leave out symmetric=False",
    ),
    "fractional zero point when symmetric": (
        {"dtype": "uint4", **GROUP, "symmetric": True, "zero_point_type": "float32"},
        "float32 zero point needs symmetric=False",
    ),
    "scales in a format": (
        {"dtype": "int4", **GROUP, "scale_format": "e8m0"},
        "e8m0 scales are for floats and mx: use scale_type='pof2'",
    ),
    "unknown format of scales": (
        {"dtype": "fp4", **GROUP, "scale_format": "e8m1"},
        "scale_format: 'e8m1' is unknown. Did you mean 'e8m0'",
    ),
    "unknown rounding of exponents": (
        {"dtype": "fp4", **GROUP, "scale_format": "e8m0", "scale_calculation_mode": "evn"},
        "scale_calculation_mode: 'evn' is unknown. Did you mean 'even'",
    ),
    "blocks without axis": ({"dtype": "mx9"}, "an integer ch_axis is missing, got None"),
    "blocks of zero": (
        {"dtype": "mx9", "ch_axis": -1, "group_size": 0},
        "group_size=0: give the elements of a block",
    ),
    "mx without elements": (
        {"dtype": "mx", "ch_axis": -1},
        "mx_element_dtype=None: dtype mx needs it",
    ),
    "elements without mx": (
        {"dtype": "fp4", **GROUP, "mx_element_dtype": "fp4"},
        "mx_element_dtype='fp4': dtype mx needs it, no other has it",
    ),
    "mx of another element": (
        {"dtype": "mx", "ch_axis": -1, "mx_element_dtype": "int4"},
        "mx_element_dtype='int4': give one of .*'int8'",
    ),
    "per block without block": (
        {"dtype": "int8", "qscheme": "per_block"},
        r"per_block and block_size=\(rows, columns\) go together, got None",
    ),
    "block without per block": (
        {"dtype": "int8", "qscheme": "per_tensor", "block_size": (2, 2)},
        r"go together, got \(2, 2\)",
    ),
    "blocks with zero point": (
        {"dtype": "mx9", "ch_axis": -1, "symmetric": False},
        "no zero point: leave out symmetric=False",
    ),
    "mx integers with zero point": (
        {"dtype": "mx", "mx_element_dtype": "int8", "ch_axis": -1, "symmetric": False},
        "blocks that share an exponent have no zero point: leave out symmetric=False",
    ),
    "heads along another axis": (
        {"dtype": "int8", "qscheme": "per_head", "ch_axis": 0},
        "heads divide the last axis: leave out ch_axis=0",
    ),
    "not an observer": (
        {"dtype": "int8", "qscheme": "per_tensor", "observer_cls": int},
        "observer_cls must be an observer class, got <class 'int'>",
    ),
    "an observer instead of its class": (
        {"dtype": "int8", "qscheme": "per_tensor", "observer_cls": 3},
        "observer_cls must be an observer class, got 3",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rule(case):
    given, said = BROKEN[case]
    with pytest.raises(ValueError, match=said) as raised:
        QuantizationSpec(**given)
    assert given["dtype"] in str(raised.value)


def test_every_rule_is_broken_by_a_case(monkeypatch):
    """With one rule taken away some case is not refused in its words: each rule has a case."""
    for rule in spec_module.RULES:
        others = [r for r in spec_module.RULES if r is not rule]
        with monkeypatch.context() as patch:
            patch.setattr(spec_module, "RULES", others)
            assert not all(_is_refused(given, said) for given, said in BROKEN.values())


def _is_refused(given, said):
    try:
        QuantizationSpec(**given)
    except (ValueError, KeyError) as error:
        return re.search(said, str(error)) is not None
    return False


ENUMS = {
    "dtype": Dtype,
    "qscheme": QSchemeType,
    "round_method": RoundType,
    "scale_type": ScaleType,
}


@pytest.mark.parametrize(
    ("field", "member"), [(f, m) for f, enum in ENUMS.items() for m in enum], ids=str
)
def test_enums_by_member_or_by_name(field, member):
    given = {"dtype": "fp8_e4m3", "qscheme": "per_group", "ch_axis": -1, "group_size": 8}
    given |= {Dtype.mx: {"mx_element_dtype": "int8"}}.get(member, {})
    given |= {QSchemeType.per_block: {"block_size": (8, 8)}}.get(member, {})
    specs = [
        QuantizationSpec(**{**given, field: value})
        for value in (member, member.name, member.name.upper())
    ]
    assert specs[0] == specs[1] == specs[2]
    assert getattr(specs[1], field) is member


@pytest.mark.parametrize("value", ZeroPointType, ids=str)
def test_zero_point_type_by_member_or_by_name(value):
    given = {"dtype": "uint4", **GROUP, "symmetric": False}
    by_member = QuantizationSpec(**given, zero_point_type=value)
    assert by_member == QuantizationSpec(**given, zero_point_type=value.name)
    assert by_member.scheme.float_zero_point is (value is ZeroPointType.float32)


@pytest.mark.parametrize(
    ("field", "wrong", "near"),
    [
        ("dtype", "fp8_e4m4", "fp8_e4m3"),
        ("qscheme", "per_chanel", "per_channel"),
        ("round_method", "half_evn", "half_even"),
        ("scale_type", "bfloat61", "bfloat16"),
        ("zero_point_type", "int23", "int32"),
        ("mx_element_dtype", "bfloat1", "bfloat16"),
        ("observer_cls", "PerTensorMinMax", "PerTensorMinMaxObserver"),
    ],
)
def test_unknown_name(field, wrong, near):
    given = {"dtype": "int8", "qscheme": "per_tensor", field: wrong}
    with pytest.raises(ValueError, match=f"{field}: '{wrong}' is unknown. Did you mean '{near}'"):
        QuantizationSpec(**given)


def test_dtype_is_required():
    with pytest.raises(ValueError, match="dtype is required"):
        QuantizationSpec(None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "int8", "qscheme": "per_tensor"}, PerTensorMinMaxObserver),
        ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}, PerChannelMinMaxObserver),
        ({"dtype": "int8", **GROUP}, PerGroupMinMaxObserver),
        ({"dtype": "float16"}, PlaceholderObserver),
        ({"dtype": "bfloat16", "observer_cls": PlaceholderObserver}, PlaceholderObserver),
    ],
    ids=["per_tensor", "per_channel", "per_group", "float16", "bfloat16"],
)
def test_default_observer(given, expected):
    spec = QuantizationSpec(**given)
    assert spec.observer_cls is expected
    assert type(spec.make_observer()) is expected


def test_observer_by_name_or_of_ones_own():
    class Own(ObserverBase):
        pass

    given = {"dtype": "int8", "qscheme": "per_tensor"}
    named = QuantizationSpec(**given, observer_cls="PerTensorMinMaxObserver")
    assert named.observer_cls is PerTensorMinMaxObserver
    assert type(QuantizationSpec(**given, observer_cls=Own).make_observer()) is Own


def test_scheme_has_the_defaults_of_what_is_left_out():
    scheme = QuantizationSpec("int8", qscheme="per_tensor").scheme
    assert scheme.qscheme is QSchemeType.per_tensor
    assert scheme.symmetric and not scheme.per_token and not scheme.float_zero_point
    assert scheme.rounding is RoundType.half_even
    assert scheme.scale == ScaleFormat("float32") and scheme.scale_mode == "even"
    assert scheme.block is None and not scheme.flat


def test_scheme_takes_every_field():
    scheme = QuantizationSpec(
        "uint4",
        **GROUP,
        symmetric=False,
        round_method="floor",
        scale_type="float16",
        zero_point_type="float32",
    ).scheme
    assert scheme.fmt is Dtype.uint4.value
    assert (scheme.qscheme, scheme.axis, scheme.group) == (QSchemeType.per_group, -1, 32)
    assert not scheme.symmetric and scheme.float_zero_point
    assert (scheme.rounding, scheme.scale) == (RoundType.floor, ScaleFormat("float16"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"scale_format": "float32", "scale_type": "float16"}, ScaleFormat("float16")),
        ({"scale_format": "e8m0", "scale_type": "float16"}, E8M0),
        ({"scale_format": "e4m3"}, E4M3),
        ({"scale_format": "e5m3"}, E5M3),
        ({"scale_type": "pof2"}, POF2),
        ({}, FLOAT32),
    ],
    ids=["float32", "e8m0", "e4m3", "e5m3", "pof2", "none"],
)
def test_format_of_scales_precedes_their_type(given, expected):
    assert QuantizationSpec("fp4", **GROUP, **given).scheme.scale == expected


@pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
def test_scheme_takes_the_rounding_of_exponents(mode):
    spec = QuantizationSpec("fp4", **GROUP, scale_format="e8m0", scale_calculation_mode=mode)
    assert spec.scheme.scale_mode == mode


def test_scheme_takes_the_block():
    scheme = QuantizationSpec("int8", qscheme="per_block", block_size=[16, 8]).scheme
    assert (scheme.qscheme, scheme.block) == (QSchemeType.per_block, (16, 8))


def test_per_channel_is_per_token_when_dynamic():
    static = QuantizationSpec("int8", qscheme="per_channel", ch_axis=1, is_dynamic=False)
    dynamic = QuantizationSpec("int8", qscheme="per_channel", ch_axis=1, is_dynamic=True)
    assert not static.scheme.per_token
    assert dynamic.scheme.per_token
    assert dynamic.for_parameter() == static
    assert static.for_parameter() == static
    assert static.for_parameter().scheme.flat and not static.scheme.flat


@pytest.mark.parametrize("size", [1, 128, -1])
def test_set_group_size(size):
    spec = QuantizationSpec("int4", **GROUP)
    spec.set_group_size(size)
    assert spec.group_size == spec.scheme.group == size


@pytest.mark.parametrize("size", [0, -2])
def test_set_group_size_refuses(size):
    spec = QuantizationSpec("int4", **GROUP)
    with pytest.raises(ValueError, match=f"group_size={size}: give a positive number, or -1"):
        spec.set_group_size(size)
    assert spec.group_size == 32


def test_both_spellings_are_one_class():
    assert QTensorConfig is QuantizationSpec


class OwnObserver(PerTensorMinMaxObserver):
    """A user's observer."""


@pytest.mark.parametrize("given", ["PerTensorMinMaxObserver", OwnObserver], ids=["name", "class"])
def test_an_observer_is_a_name_until_it_is_read(given):
    spec = QuantizationSpec("int8", qscheme="per_tensor", observer_cls=given)
    changed = spec.changed(symmetric=True).for_parameter().stages[0]
    assert (spec.given_observer, changed.given_observer) == (given, given)
    expected = PerTensorMinMaxObserver if isinstance(given, str) else given
    assert spec.observer_cls is changed.observer_cls is expected
    assert type(spec.make_observer()) is expected


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_table_says_which_observers_are_for_integers(name):
    assert observer_class(name).is_for_integers is (name in FOR_INTEGERS)
