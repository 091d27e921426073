"""Every number format against what torch and ml_dtypes say of the same type."""

from dataclasses import FrozenInstanceError

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype

# (bits, smallest, largest), from the integer types of others; 3 bits have none.
INTEGERS = {
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
# Packed types that checkpoints hold.
PACKED = {
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
    assert {*INTEGERS, *FLOATS} == set(PACKED) == set(Dtype.__members__)


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
    width = INTEGERS[dtype.name][0] if dtype.name in INTEGERS else FLOATS[dtype.name][1].bits
    assert dtype.to_bitwidth() == width


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


@pytest.mark.parametrize("kind", [torch.float32, torch.int32, torch.bool], ids=str)
def test_torch_types_that_are_no_format(kind):
    with pytest.raises(ValueError, match=f"No number format is stored as {kind}"):
        Dtype.from_torch_dtype(kind)


def test_a_format_is_a_value():
    fmt = Dtype.int8.value
    with pytest.raises(FrozenInstanceError):
        fmt.bits = 4
    assert repr(Dtype.int8) == "Dtype.int8"
    assert len({d.value for d in Dtype}) == len(Dtype)
