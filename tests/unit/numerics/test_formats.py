"""Every number format against what torch and ml_dtypes say of the same type."""

import re
from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.codec import decode
from quark.torch.numerics.dtypes import torch_dtype, type_name
from quark.torch.numerics.formats import Dtype
from tests.unit.numerics import kinds

# Integers of others.
INTEGERS = {
    "int32": torch.iinfo(torch.int32),
    "int16": torch.iinfo(torch.int16),
    "uint16": torch.iinfo(torch.uint16),
    "int8": torch.iinfo(torch.int8),
    "uint8": torch.iinfo(torch.uint8),
    "int4": ml_dtypes.iinfo(ml_dtypes.int4),
    "uint4": ml_dtypes.iinfo(ml_dtypes.uint4),
    "int2": ml_dtypes.iinfo(ml_dtypes.int2),
    "uint2": ml_dtypes.iinfo(ml_dtypes.uint2),
}
FLOATS = {
    "fp8_e4m3": (torch.float8_e4m3fn, ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)),
    "fp8_e5m2": (torch.float8_e5m2, ml_dtypes.finfo(ml_dtypes.float8_e5m2)),
    "bfloat16": (torch.bfloat16, ml_dtypes.finfo(ml_dtypes.bfloat16)),
    "float16": (torch.float16, ml_dtypes.finfo(np.float16)),
}
# Floats that torch has no type for.
ENCODED = {
    "fp6_e3m2": ml_dtypes.finfo(ml_dtypes.float6_e3m2fn),
    "fp6_e2m3": ml_dtypes.finfo(ml_dtypes.float6_e2m3fn),
    "fp4": ml_dtypes.finfo(ml_dtypes.float4_e2m1fn),
}
# Packed types of formats that checkpoints hold: what is written stays readable.
PACKED = {
    "int32": torch.int32,
    "int16": torch.int16,
    "uint16": torch.uint16,
    "uint7": torch.uint8,
    "uint6": torch.uint8,
    "uint5": torch.uint8,
    "uint3": torch.uint8,
    "uint2": torch.uint8,
    "fp8_e5m3": torch.uint8,
    "fp6_e3m2": torch.uint8,
    "fp6_e2m3": torch.uint8,
    "fp4": torch.uint8,
    "mx": torch.int8,
    "mx6": torch.uint8,
    "mx9": torch.int8,
    "bfp16": torch.int8,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int7": torch.uint8,
    "int6": torch.uint8,
    "int5": torch.uint8,
    "int4": torch.int32,
    "uint4": torch.int32,
    "int3": torch.uint8,
    "int2": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def test_every_format_is_of_one_kind():
    floats = kinds.FLOATS, kinds.UNSIGNED_FLOATS, kinds.CASTS, kinds.TABLES
    groups = (kinds.ALL_INTEGERS, kinds.SHARED, *floats)
    assert sorted(name for group in groups for name in group) == sorted(Dtype.__members__)
    assert {*INTEGERS} <= {*kinds.ALL_INTEGERS}
    assert {*FLOATS} == {*kinds.NATIVE, *kinds.CASTS} and {*ENCODED} <= {*kinds.ENCODED}


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_goes_by_its_name(dtype):
    assert dtype.value.name == dtype.name


@pytest.mark.parametrize("name", kinds.ALL_INTEGERS)
def test_integer_range(name):
    """Two's complement, of the width that the name gives."""
    fmt, bits = Dtype[name].value, int(re.search(r"\d+", name)[0])
    lowest, count = 0 if name.startswith("u") else -(1 << (bits - 1)), 1 << bits
    assert (fmt.bits, fmt.qmin, fmt.qmax) == (bits, lowest, lowest + count - 1)
    assert fmt.signed == (fmt.qmin < 0)
    assert not fmt.is_float and fmt.scaled and fmt.native is None


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_limits_of_others(name):
    fmt, info = Dtype[name].value, INTEGERS[name]
    assert (fmt.bits, fmt.qmin, fmt.qmax) == (info.bits, info.min, info.max)


@pytest.mark.parametrize("name", kinds.ALL_INTEGERS)
def test_integer_codes_fit_their_type(name):
    fmt = Dtype[name].value
    held = torch.iinfo(fmt.code_dtype)
    assert held.min <= fmt.qmin < fmt.qmax <= held.max


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("whose", ["torch", "ml_dtypes"])
def test_float_limits(name, whose):
    fmt = Dtype[name].value
    kind, other = FLOATS[name]
    info = torch.finfo(kind) if whose == "torch" else other
    assert fmt.is_float and fmt.signed
    assert fmt.bits == info.bits
    assert fmt.max_value == float(info.max)
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert 2.0**-fmt.mantissa_bits == float(info.eps)


@pytest.mark.parametrize("name", FLOATS)
def test_float_fields_fill_the_code(name):
    fmt = Dtype[name].value
    kind, info = FLOATS[name]
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == fmt.bits
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)
    assert fmt.native == type_name(kind)
    assert fmt.code_dtype == kind


@pytest.mark.parametrize("name", kinds.ENCODED)
def test_values_of_floats_without_a_torch_type(name):
    """As ml_dtypes has them, or as the fields of the name define them."""
    fmt, values = Dtype[name].value, torch.from_numpy(kinds.values_of(name))
    assert fmt.is_encoded and fmt.code_dtype == torch.uint8
    assert decode(torch.arange(1 << fmt.bits).to(torch.uint8), fmt).equal(values)
    assert fmt.max_value == values.max() and -fmt.max_value == values.min()
    assert fmt.mantissa_bits == kinds.mantissa_bits(name)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == fmt.bits


@pytest.mark.parametrize("name", [*kinds.FLOATS, *kinds.TABLES])
def test_answers_of_floats_and_tables(name):
    """They follow from the sorted values of all codes."""
    fmt = Dtype[name].value
    values = np.array(fmt.values) if name in kinds.TABLES else kinds.values_of(name).astype(float)
    values = np.unique(values[np.isfinite(values)])
    gaps, magnitudes = np.diff(values), np.abs(values)
    low, high = values[0] - gaps[0] / 2, values[-1] + gaps[-1] / 2
    assert fmt.reach() == (values[0], values[-1]) and fmt.reach(0.5) == (low, high)
    assert fmt.smallest == magnitudes[magnitudes > 0].min()
    assert fmt.separation == (gaps / np.maximum(magnitudes[1:], magnitudes[:-1])).min()
    assert fmt.has_rule == (name not in kinds.TABLES)


@pytest.mark.parametrize("name", kinds.INTEGERS)
def test_reach_of_integers(name):
    fmt = Dtype[name].value
    assert fmt.reach(0.5) == (fmt.qmin - 0.5, fmt.qmax + 0.5)


@pytest.mark.parametrize("name", ENCODED)
def test_limits_of_floats_without_a_torch_type(name):
    fmt, info = Dtype[name].value, ENCODED[name]
    assert fmt.is_encoded and fmt.native is None and fmt.code_dtype == torch.uint8
    assert (fmt.bits, fmt.max_value) == (info.bits, float(info.max))
    assert 2.0**fmt.min_exponent == float(info.smallest_normal)
    assert 2.0**fmt.max_exponent <= fmt.max_value < 2.0 ** (fmt.max_exponent + 1)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)


def test_formats_as_wide_as_bfloat16_are_not_scaled():
    assert {d.name for d in Dtype if not d.value.scaled} == {"bfloat16", "float16"}


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_packed_type(dtype):
    fmt = dtype.value
    stored = torch_dtype(fmt.word_dtype) if fmt.word_codes > 1 else fmt.code_dtype
    assert dtype.to_torch_packed_dtype() == fmt.storage_dtype == PACKED.get(dtype.name, stored)


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_packed_words_have_no_spare_bits(dtype):
    fmt = dtype.value
    assert fmt.word_codes * fmt.bits % (8 * fmt.storage_dtype.itemsize) == 0


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_bitwidth(dtype):
    """The name says it, except for codes of blocks, which share an exponent."""
    blocks = {"mx": 8, "mx6": 5, "mx9": 8, "bfp16": 8}
    bits = blocks.get(dtype.name) or int(re.search(r"\d+", dtype.name)[0])
    assert dtype.to_bitwidth() == bits


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
def test_found_by_name_in_any_case(dtype, spelling):
    assert Dtype.from_str(spelling(dtype.name)) is dtype
    assert Dtype(spelling(dtype.name)) is dtype


@pytest.mark.parametrize("name", ["int9", "", "torch.int8", "fp8"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match="is not a valid Dtype"):
        Dtype.from_str(name)


@pytest.mark.parametrize("value", [8, None, torch.int8])
def test_only_names_are_looked_up(value):
    with pytest.raises(ValueError, match="is not a valid Dtype"):
        Dtype(value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.int32, "int32"),
        (torch.int16, "int16"),
        (torch.int8, "int8"),
        (torch.uint8, "uint8"),
        (torch.float8_e4m3fn, "fp8_e4m3"),
        (torch.float8_e5m2, "fp8_e5m2"),
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
    ],
    ids=str,
)
def test_from_torch_dtype(kind, name):
    assert Dtype.from_torch_dtype(kind) is Dtype[name]


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool], ids=str)
def test_torch_types_that_are_no_format(kind):
    with pytest.raises(ValueError, match=f"No number format is stored as {kind}"):
        Dtype.from_torch_dtype(kind)


def test_a_format_is_a_value():
    fmt = Dtype.int8.value
    with pytest.raises(FrozenInstanceError):
        fmt.bits = 4
    assert repr(Dtype.int8) == "Dtype.int8"
    assert len({d.value for d in Dtype}) == len(Dtype)
