"""The documented helper classes: arguments, defaults, and the specification each one makes."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from quark.torch.numerics.scale_formats import E5M3, E8M0, FLOAT32, POF2, ScaleFormat
from quark.torch.quantization.config.config import QuantizationSpec
from quark.torch.quantization.config.spec_classes import (
    SPEC_CLASSES,
    DataTypeSpec,
    ProgressiveSpec,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark.torch.quantization.observer import observer
from quark.torch.quantization.observer.scale_search import PerBlockMXDiffsObserver

SYM = {"symmetric": True, "scale_type": "float", "round_method": "half_even", "is_dynamic": False}
ASYM = {**SYM, "symmetric": False}
TENSOR = {"observer_method": "min_max"}
GROUPED_INT = {k: SYM[k] for k in ("symmetric", "is_dynamic", "scale_type", "round_method")}
GROUPED_UINT = {**GROUPED_INT, "symmetric": False}
GROUPED_FLOAT = {"scale_format": "float32", "scale_calculation_mode": None, "is_dynamic": True}
GROUP = ["ch_axis", "group_size"]
MICROSCALING = {"is_dynamic": True, "scale_calculation_mode": "even"}
EVEN = {"scale_calculation_mode": "even"}

# Class -> (format, granularity, required arguments, documented defaults in their order), as the
# API documents them. MORE_ARGUMENTS follow them: those of earlier versions.
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
    "Int2PerGroupSpec": ("int2", "per_group", GROUP, SYM),
    "Int3PerGroupSpec": ("int3", "per_group", GROUP, SYM),
    "Int4PerGroupSpec": ("int4", "per_group", GROUP, GROUPED_INT),
    "Int8PerGroupSpec": ("int8", "per_group", GROUP, SYM),
    "Uint4PerGroupSpec": ("uint4", "per_group", GROUP, GROUPED_UINT),
    "Uint8PerGroupSpec": ("uint8", "per_group", GROUP, ASYM),
    "FP8E4M3PerTensorSpec": (
        "fp8_e4m3",
        "per_tensor",
        [],
        {**TENSOR, "scale_type": None, "is_dynamic": False},
    ),
    "FP8E5M2PerTensorSpec": ("fp8_e5m2", "per_tensor", [], {**TENSOR, **SYM}),
    "FP8E4M3PerChannelSpec": ("fp8_e4m3", "per_channel", ["ch_axis"], SYM),
    "FP8E5M2PerChannelSpec": ("fp8_e5m2", "per_channel", ["ch_axis"], SYM),
    "FP8E4M3PerGroupSpec": ("fp8_e4m3", "per_group", GROUP, GROUPED_FLOAT),
    "FP8E5M2PerGroupSpec": ("fp8_e5m2", "per_group", GROUP, GROUPED_FLOAT),
    "FP8E5M3PerTensorSpec": (
        "fp8_e5m3",
        "per_tensor",
        [],
        {**TENSOR, "scale_type": None, "is_dynamic": False},
    ),
    "FP6E2M3PerGroupSpec": ("fp6_e2m3", "per_group", GROUP, GROUPED_FLOAT),
    "FP6E3M2PerGroupSpec": ("fp6_e3m2", "per_group", GROUP, GROUPED_FLOAT),
    "FP4PerGroupSpec": ("fp4", "per_group", GROUP, {**GROUPED_FLOAT, "scale_type": "float"}),
    "AmdFP4Spec": ("fp4", "per_group", GROUP, {"is_dynamic": True}),
    "OCP_MXFP8E4M3Spec": ("fp8_e4m3", "per_group", ["ch_axis"], MICROSCALING),
    "OCP_MXFP8E5M2Spec": ("fp8_e5m2", "per_group", ["ch_axis"], MICROSCALING),
    "OCP_MXFP6E3M2Spec": ("fp6_e3m2", "per_group", ["ch_axis"], MICROSCALING),
    "OCP_MXFP6E2M3Spec": ("fp6_e2m3", "per_group", ["ch_axis"], MICROSCALING),
    "OCP_MXFP4Spec": ("fp4", "per_group", ["ch_axis"], MICROSCALING),
    "OCP_MXFP4DiffsSpec": ("fp4", "per_group", ["ch_axis"], {**MICROSCALING, "is_dynamic": False}),
    "OCP_MXINT8Spec": ("mx", None, ["ch_axis"], MICROSCALING),
    "MXSpec": (
        "mx",
        None,
        [],
        {"mx_element_dtype": "fp8_e4m3", "ch_axis": -1, "block_size": 32, "is_dynamic": True},
    ),
    "MX6Spec": ("mx6", None, ["ch_axis", "block_size"], EVEN),
    "MX9Spec": ("mx9", None, ["ch_axis", "block_size"], EVEN),
    "BFP16Spec": ("bfp16", None, ["ch_axis"], EVEN),
    "Float16Spec": ("float16", None, [], {}),
    "Bfloat16Spec": ("bfloat16", None, [], {}),
}
GROUPED_FP8 = {"scale_type": "float", "symmetric": None, "round_method": "half_even"}
MORE_ARGUMENTS = {
    "FP8E4M3PerTensorSpec": {"symmetric": True, "round_method": "half_even"},
    "FP8E4M3PerGroupSpec": GROUPED_FP8,
    "FP8E5M2PerGroupSpec": GROUPED_FP8,
    **{key: {"is_dynamic": True} for key in ("MX6Spec", "MX9Spec", "BFP16Spec")},
}
REQUIRED_VALUES = {"ch_axis": -1, "group_size": 32, "block_size": 16}
# Elements of a group where it is no argument called group_size.
GROUP_SIZES = {name: 32 for name in DOCUMENTED if name.startswith(("OCP_", "MXSpec"))} | {
    "MX6Spec": 16,
    "MX9Spec": 16,
    "BFP16Spec": 8,
}
GROUPED_FLOATS = [name for name in DOCUMENTED if re.match(r"FP\d.*PerGroup|Amd", name)]
SHARED = dict.fromkeys([*GROUP_SIZES, *GROUPED_FLOATS], observer.PerBlockMXObserver) | {
    "OCP_MXFP4DiffsSpec": PerBlockMXDiffsObserver,
    **dict.fromkeys(("MX6Spec", "MX9Spec", "BFP16Spec"), observer.PerBlockBFPObserver),
}
ELEMENTS = {"OCP_MXINT8Spec": Dtype.int8, "MXSpec": Dtype.fp8_e4m3}
OBSERVERS = {
    "per_tensor": observer.PerTensorMinMaxObserver,
    "per_channel": observer.PerChannelMinMaxObserver,
    "per_group": observer.PerGroupMinMaxObserver,
    None: observer.PlaceholderObserver,
}


# Formats whose scales are part of the codes.
SHARES_EXPONENTS_INSIDE = {"MX6Spec", "MX9Spec", "BFP16Spec"}


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
    expected = {**DOCUMENTED[name][3], **MORE_ARGUMENTS.get(name, {})}
    assert list(defaults.items()) == list(expected.items()), "in this order"


@pytest.mark.parametrize("name", [name for name, row in DOCUMENTED.items() if "ch_axis" in row[2]])
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
    assert spec.observer_cls is SHARED.get(name, OBSERVERS[qscheme])
    assert spec.ch_axis == (-1 if "ch_axis" in [*required, *defaults] else None)
    assert spec.group_size == (32 if "group_size" in required else GROUP_SIZES.get(name))
    assert spec.mx_element_dtype is ELEMENTS.get(name)
    more = MORE_ARGUMENTS.get(name, {})
    assert spec.is_dynamic == {**defaults, **more}.get("is_dynamic")
    assert spec.scale_calculation_mode == defaults.get("scale_calculation_mode")
    assert spec.scheme.symmetric is defaults.get("symmetric", True)
    assert spec.scheme.rounding is RoundType.half_even


# Class -> what its specification writes into config.json other than null, as version 0.13 does.
FLOATS = {"ch_axis": -1, "qscheme": "per_group", "round_method": "half_even"}
FLOATS |= {"observer_cls": "PerBlockMXObserver", "is_dynamic": True}
GROUP_32 = {"group_size": 32, "scale_format": "float32", "scale_type": "float"}
WRITTEN = {
    "FP4PerGroupSpec": {**FLOATS, **GROUP_32, "dtype": "fp4"},
    "FP6E2M3PerGroupSpec": {**FLOATS, **GROUP_32, "dtype": "fp6_e2m3"},
    "FP6E3M2PerGroupSpec": {**FLOATS, **GROUP_32, "dtype": "fp6_e3m2"},
    "FP8E4M3PerGroupSpec": {**FLOATS, **GROUP_32, "dtype": "fp8_e4m3"},
    "FP8E5M2PerGroupSpec": {**FLOATS, **GROUP_32, "dtype": "fp8_e5m2"},
    "OCP_MXFP4Spec": {**FLOATS, **GROUP_32, **EVEN, "dtype": "fp4", "scale_format": "e8m0"},
    "AmdFP4Spec": {
        **FLOATS,
        "dtype": "fp4",
        "group_size": 32,
        "scale_format": "e5m3",
        "scale_type": "float8_e5m3",
    },
    "OCP_MXINT8Spec": {
        **EVEN,
        "dtype": "mx",
        "mx_element_dtype": "int8",
        "ch_axis": -1,
        "group_size": 32,
    },
    "MX6Spec": {**EVEN, "dtype": "mx6", "ch_axis": -1, "group_size": 16},
    "MX9Spec": {**EVEN, "dtype": "mx9", "ch_axis": -1, "group_size": 16},
    "BFP16Spec": {**EVEN, "dtype": "bfp16", "ch_axis": -1, "group_size": 8},
}
IN_ALL = {
    "zero_point_type": "int32",
    "is_scale_quant": False,
    "enable_buffer_reuse": False,
    "max_input_numel": 4194304,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(name):
    spec = make(name).to_quantization_spec()
    written = spec.to_dict()
    assert {k: v for k, v in written.items() if v is not None} == {**IN_ALL, **WRITTEN[name]}
    assert QuantizationSpec.from_dict(written) == spec


@pytest.mark.parametrize("name", ["MX6Spec", "MX9Spec", "BFP16Spec", "OCP_MXINT8Spec"])
@pytest.mark.parametrize("is_dynamic", [True, False, None])
def test_blocks_of_a_format_are_dynamic_unless_said_otherwise(name, is_dynamic):
    spec = replace(make(name).to_quantization_spec(), is_dynamic=is_dynamic)
    assert spec.is_dynamic is (is_dynamic is not False)
    assert spec.to_dict()["is_dynamic"] is (False if is_dynamic is False else None)
    assert QuantizationSpec.from_dict(spec.to_dict()) == spec
    assert spec.for_parameter().is_dynamic is False


@pytest.mark.parametrize("name", [n for n in DOCUMENTED if n not in SHARES_EXPONENTS_INSIDE])
def test_scales_of_the_specification(name):
    is_microscaling = name.startswith(("OCP_", "MXSpec"))
    expected = E8M0 if is_microscaling else E5M3 if name == "AmdFP4Spec" else FLOAT32
    assert make(name).to_quantization_spec().scheme.scale == expected


@pytest.mark.parametrize("name", SPEC_CLASSES)
def test_is_importable_from_both_documented_paths(name):
    from quark.torch import quantization
    from quark.torch.quantization.config import config

    assert getattr(config, name) is getattr(quantization, name) is SPEC_CLASSES[name]
    assert issubclass(SPEC_CLASSES[name], DataTypeSpec)
    assert SPEC_CLASSES[name].__name__ == name
    assert DOCUMENTED[name][0] in SPEC_CLASSES[name].__doc__


GIVEN = {
    "scale_type": ("float16", ScaleType.float16),
    "round_method": ("floor", RoundType.floor),
    "is_dynamic": (True, True),
    "scale_format": ("e8m0", "e8m0"),
    "scale_calculation_mode": ("ceil", "ceil"),
    "ch_axis": (0, 0),
    "group_size": (16, 16),
    "zero_point_type": ("float32", ZeroPointType.float32),
}


@pytest.mark.parametrize("name", [name for name in DOCUMENTED if DOCUMENTED[name][2:] != ([], {})])
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_given_arguments_reach_the_specification(name, is_dynamic):
    given = {**GIVEN, "is_dynamic": (is_dynamic, is_dynamic)}
    arguments = {p.name for p in parameters(name)} & set(given)
    spec = make(name, **{a: given[a][0] for a in arguments}).to_quantization_spec()
    assert {a: getattr(spec, a) for a in arguments} == {a: given[a][1] for a in arguments}


@pytest.mark.parametrize("name", ["MX6Spec", "MX9Spec", "MXSpec"])
def test_block_size_is_the_group_of_the_format(name):
    spec = make(name, block_size=64).to_quantization_spec()
    assert spec.scheme.group == spec.group_size == 64
    assert spec.block_size is None


@pytest.mark.parametrize("given", ["helper", "specification"])
@pytest.mark.parametrize("kind", [ProgressiveSpec, ScaleQuantSpec])
def test_two_stages_are_a_list(kind, given):
    helpers = [make("FP4PerGroupSpec"), make("FP8E4M3PerTensorSpec")]
    first, second = (helper.to_quantization_spec() for helper in helpers)
    made = kind(*(helpers if given == "helper" else (first, second))).to_quantization_spec()
    assert made == [first, replace(second, is_scale_quant=kind is ScaleQuantSpec)]
    assert not second.is_scale_quant, "what is given stays as it is"


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


# Documented names of the types of scales -> member and format.
SCALE_TYPES = {
    "float": (ScaleType.float, FLOAT32),
    "float32": (ScaleType.float32, FLOAT32),
    "float16": (ScaleType.float16, ScaleFormat("float16")),
    "bfloat16": (ScaleType.bfloat16, ScaleFormat("bfloat16")),
    "power_of_2": (ScaleType.pof2, POF2),
    "float8_e5m3": (ScaleType.float8_e5m3, E5M3),
}


@pytest.mark.parametrize("name", SCALE_TYPES)
def test_documented_names_of_scale_types(name):
    """In helpers, in specifications and in files."""
    member, expected = SCALE_TYPES[name]
    spec = make("Int8PerTensorSpec", scale_type=name).to_quantization_spec()
    assert (spec.scale_type, spec.scheme.scale) == (member, expected)
    assert replace(spec, scale_type=name) == spec
    assert QuantizationSpec.from_dict({**spec.to_dict(), "scale_type": name}) == spec
    assert spec.to_dict()["scale_type"] == member.value


def test_scales_of_power_of_2_are_powers_of_two():
    spec = make("Int8PerTensorSpec", scale_type="power_of_2").to_quantization_spec()
    observer = spec.make_observer()
    observer(torch.tensor([-3.0, 1.0]))
    scale, _ = observer.calculate_qparams()
    assert float(scale) == 2.0**-5  # 3 / 127.5 = 2^-5.4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"observer_method": 3}, "Int8PerTensorSpec.observer_method: expected a text or None"),
        ({"symmetric": "no"}, "Int8PerTensorSpec.symmetric: expected True or False or None"),
        ({"scale_type": 3}, "Int8PerTensorSpec.scale_type: expected a name or a text or None"),
    ],
)
def test_arguments_of_another_type_are_refused(given, said):
    with pytest.raises(TypeError, match=said):
        make("Int8PerTensorSpec", **given)


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scale_format": "e8m1"}, "scale_format: 'e8m1'.*Did you mean 'e8m0'"),
        ({"scale_calculation_mode": "flor"}, "scale_calculation_mode: 'flor'.*Did.*'floor'"),
    ],
    ids=["scale_format", "scale_calculation_mode"],
)
def test_unknown_names_of_scales_name_the_nearest(given, said):
    with pytest.raises(ValueError, match=said):
        make("FP4PerGroupSpec", **given).to_quantization_spec()


def test_unknown_argument_is_named():
    with pytest.raises(TypeError, match="grop_size"):
        make("Int4PerGroupSpec", grop_size=3)
