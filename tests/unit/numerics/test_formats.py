"""Every number format against what torch and ml_dtypes say of the same type."""

from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype

# (bits, smallest, largest), from the integer types of others; 3 bits have none.
INTEGERS = {
    "int32": (32, torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max),
    "int16": (16, torch.iinfo(torch.int16).min, torch.iinfo(torch.int16).max),
    "uint16": (16, torch.iinfo(torch.uint16).min, torch.iinfo(torch.uint16).max),
    "uint7": (7, 0, 127),
    "uint6": (6, 0, 63),
    "uint5": (5, 0, 31),
    "uint3": (3, 0, 7),
    "uint2": (2, ml_dtypes.iinfo(ml_dtypes.uint2).min, ml_dtypes.iinfo(ml_dtypes.uint2).max),
    "int8": (8, torch.iinfo(torch.int8).min, torch.iinfo(torch.int8).max),
    "uint8": (8, torch.iinfo(torch.uint8).min, torch.iinfo(torch.uint8).max),
    "int4": (4, ml_dtypes.iinfo(ml_dtypes.int4).min, ml_dtypes.iinfo(ml_dtypes.int4).max),
    "uint4": (4, ml_dtypes.iinfo(ml_dtypes.uint4).min, ml_dtypes.iinfo(ml_dtypes.uint4).max),
    "int3": (3, -4, 3),
    "int2": (2, ml_dtypes.iinfo(ml_dtypes.int2).min, ml_dtypes.iinfo(ml_dtypes.int2).max),
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
# Formats with exponents of their own, and the unsigned float of scales: see test_block_formats.py
# and test_codec.py. (bits of a code)
OTHERS = {"mx": 8, "mx6": 5, "mx9": 8, "bfp16": 8, "fp8_e5m3": 8}
# Packed types that checkpoints hold.
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
    "int4": torch.int32,
    "uint4": torch.int32,
    "int3": torch.uint8,
    "int2": torch.uint8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def test_every_format_is_tested_here():
    assert {*INTEGERS, *FLOATS, *ENCODED, *OTHERS} == set(PACKED) == set(Dtype.__members__)


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_goes_by_its_name(dtype):
    assert dtype.value.name == dtype.name


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_range(name):
    fmt = Dtype[name].value
    assert (fmt.bits, fmt.qmin, fmt.qmax) == INTEGERS[name]
    assert fmt.signed == (fmt.qmin < 0)
    assert not fmt.is_float and fmt.scaled and fmt.native is None


@pytest.mark.parametrize("name", INTEGERS)
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
    assert fmt.native == fmt.code_dtype == kind


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
    assert dtype.to_torch_packed_dtype() == dtype.value.storage_dtype == PACKED[dtype.name]


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_packed_words_have_no_spare_bits(dtype):
    fmt = dtype.value
    assert fmt.word_codes * fmt.bits % (8 * fmt.storage_dtype.itemsize) == 0


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_bitwidth(dtype):
    widths = {name: limits[0] for name, limits in INTEGERS.items()}
    widths |= {name: info.bits for name, (_, info) in FLOATS.items()}
    widths |= {name: info.bits for name, info in ENCODED.items()}
    assert dtype.to_bitwidth() == {**widths, **OTHERS}[dtype.name]


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
@pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
def test_found_by_name_in_any_case(dtype, spelling):
    assert Dtype.from_str(spelling(dtype.name)) is dtype
    assert Dtype(spelling(dtype.name)) is dtype


@pytest.mark.parametrize("name", ["int5", "", "torch.int8", "fp8"])
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
