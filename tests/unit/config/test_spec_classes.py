"""The documented helper classes: arguments, defaults, and the specification each one makes."""

import inspect

import pytest
import torch

from quark.torch.quantization.config.config import QuantizationSpec
from quark.torch.quantization.config.spec import SPEC_CLASSES, DataTypeSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType
from quark.torch.quantization.observer import observer

SYM = {"symmetric": True, "scale_type": "float", "round_method": "half_even", "is_dynamic": False}
ASYM = {**SYM, "symmetric": False}
TENSOR = {"observer_method": "min_max"}
GROUPED_FLOAT = {"scale_format": "float32", "scale_calculation_mode": None, "is_dynamic": True}

# Class -> (format, granularity, required arguments, documented defaults), as the API documents
# them. Three classes have more arguments, all with the defaults of their siblings.
DOCUMENTED = {
    "Int4PerTensorSpec": ("int4", "per_tensor", [], {**TENSOR, **SYM}),
    "Int8PerTensorSpec": ("int8", "per_tensor", [], {**TENSOR, **SYM}),
    "Uint4PerTensorSpec": ("uint4", "per_tensor", [], {**TENSOR, **ASYM}),
    "Uint8PerTensorSpec": ("uint8", "per_tensor", [], {**TENSOR, **ASYM}),
    "Int3PerChannelSpec": ("int3", "per_channel", ["ch_axis"], ASYM),
    "Int4PerChannelSpec": ("int4", "per_channel", ["ch_axis"], SYM),
    "Int8PerChannelSpec": ("int8", "per_channel", ["ch_axis"], ASYM),
    # Documented without a default of is_dynamic, which must then always be given.
    "Uint4PerChannelSpec": (
        "uint4",
        "per_channel",
        ["ch_axis"],
        {**ASYM, "zero_point_type": "int32"},
    ),
    "Uint8PerChannelSpec": ("uint8", "per_channel", ["ch_axis"], SYM),
    "Int2PerGroupSpec": ("int2", "per_group", ["ch_axis", "group_size"], SYM),
    "Int3PerGroupSpec": ("int3", "per_group", ["ch_axis", "group_size"], SYM),
    "Int4PerGroupSpec": ("int4", "per_group", ["ch_axis", "group_size"], SYM),
    "Int8PerGroupSpec": ("int8", "per_group", ["ch_axis", "group_size"], SYM),
    "Uint4PerGroupSpec": ("uint4", "per_group", ["ch_axis", "group_size"], ASYM),
    "Uint8PerGroupSpec": ("uint8", "per_group", ["ch_axis", "group_size"], ASYM),
    "FP8E4M3PerTensorSpec": (
        "fp8_e4m3",
        "per_tensor",
        [],
        {**TENSOR, "scale_type": None, "is_dynamic": False},
    ),
    "FP8E5M2PerTensorSpec": ("fp8_e5m2", "per_tensor", [], {**TENSOR, **SYM}),
    "FP8E4M3PerChannelSpec": ("fp8_e4m3", "per_channel", ["ch_axis"], SYM),
    "FP8E5M2PerChannelSpec": ("fp8_e5m2", "per_channel", ["ch_axis"], SYM),
    "FP8E4M3PerGroupSpec": ("fp8_e4m3", "per_group", ["ch_axis", "group_size"], GROUPED_FLOAT),
    "FP8E5M2PerGroupSpec": ("fp8_e5m2", "per_group", ["ch_axis", "group_size"], GROUPED_FLOAT),
    "Float16Spec": ("float16", None, [], {}),
    "Bfloat16Spec": ("bfloat16", None, [], {}),
}
MORE_ARGUMENTS = {
    "FP8E4M3PerTensorSpec": {"symmetric": True, "round_method": "half_even"},
    "FP8E4M3PerGroupSpec": {k: SYM[k] for k in ("symmetric", "scale_type", "round_method")},
    "FP8E5M2PerGroupSpec": {k: SYM[k] for k in ("symmetric", "scale_type", "round_method")},
}
REQUIRED_VALUES = {"ch_axis": -1, "group_size": 32}
OBSERVERS = {
    "per_tensor": observer.PerTensorMinMaxObserver,
    "per_channel": observer.PerChannelMinMaxObserver,
    "per_group": observer.PerGroupMinMaxObserver,
    None: observer.PlaceholderObserver,
}


def make(name, **given):
    required = {argument: REQUIRED_VALUES[argument] for argument in DOCUMENTED[name][2]}
    return SPEC_CLASSES[name](**{**required, **given})


def parameters(name):
    return inspect.signature(SPEC_CLASSES[name]).parameters.values()


def test_every_class_is_in_the_table():
    assert set(SPEC_CLASSES) == set(DOCUMENTED)


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_arguments_without_default_are_the_required_ones(name):
    required = [p.name for p in parameters(name) if p.default is inspect.Parameter.empty]
    assert required == DOCUMENTED[name][2]


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_defaults(name):
    defaults = {p.name: p.default for p in parameters(name) if p.default is not p.empty}
    assert defaults == {**DOCUMENTED[name][3], **MORE_ARGUMENTS.get(name, {})}


@pytest.mark.parametrize("name", [name for name, row in DOCUMENTED.items() if row[2]])
def test_a_missing_required_argument_is_named(name):
    with pytest.raises(TypeError, match="ch_axis"):
        SPEC_CLASSES[name]()


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_specification(name):
    dtype, qscheme, required, defaults = DOCUMENTED[name]
    spec = make(name).to_quantization_spec()
    assert isinstance(spec, QuantizationSpec)
    assert spec.dtype is Dtype[dtype]
    assert spec.qscheme is (qscheme and QSchemeType[qscheme])
    assert spec.observer_cls is OBSERVERS[qscheme]
    assert spec.ch_axis == (-1 if "ch_axis" in required else None)
    assert spec.group_size == (32 if "group_size" in required else None)
    assert spec.is_dynamic == defaults.get("is_dynamic")
    if qscheme is not None:
        assert spec.symmetric is defaults.get("symmetric", True)
        assert spec.round_method is RoundType.half_even
        assert spec.scheme.scale_dtype is torch.float32


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_is_importable_from_both_documented_paths(name):
    from quark.torch import quantization
    from quark.torch.quantization.config import config

    assert getattr(config, name) is getattr(quantization, name) is SPEC_CLASSES[name]
    assert issubclass(SPEC_CLASSES[name], DataTypeSpec)
    assert SPEC_CLASSES[name].__name__ == name
    assert DOCUMENTED[name][0] in SPEC_CLASSES[name].__doc__


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if DOCUMENTED[name][1]])
def test_given_arguments_reach_the_specification(name):
    spec = make(
        name, scale_type="float16", round_method="floor", is_dynamic=True
    ).to_quantization_spec()
    assert spec.scale_type is ScaleType.float16
    assert spec.round_method is RoundType.floor
    assert spec.is_dynamic is True


def test_arguments_may_be_members():
    by_name = make("Int8PerTensorSpec", scale_type="bfloat16", round_method="round")
    by_member = make(
        "Int8PerTensorSpec", scale_type=ScaleType.bfloat16, round_method=RoundType.round
    )
    assert by_name.to_quantization_spec() == by_member.to_quantization_spec()


def test_arguments_by_position():
    spec = SPEC_CLASSES["Int8PerTensorSpec"]("min_max", False, "float16", "floor", True)
    assert spec.to_quantization_spec() == QuantizationSpec(
        "int8",
        qscheme="per_tensor",
        symmetric=False,
        scale_type="float16",
        round_method="floor",
        is_dynamic=True,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"observer_method": "minmax"}, "observer_method: 'minmax'.*Did you mean 'min_max'"),
        ({"scale_type": "flaot16"}, "scale_type: 'flaot16'.*Did you mean 'float16'"),
        ({"round_method": "half_evn"}, "round_method: 'half_evn'.*Did you mean 'half_even'"),
    ],
    ids=["observer_method", "scale_type", "round_method"],
)
def test_unknown_names_name_the_nearest(given, said):
    with pytest.raises(ValueError, match=said):
        make("Int8PerTensorSpec", **given).to_quantization_spec()


def test_unknown_argument_is_named():
    with pytest.raises(TypeError, match="grop_size"):
        make("Int4PerGroupSpec", grop_size=3)
