"""Codes of floats that torch has no type for, each against ml_dtypes or exact fractions."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.codec import (
    countable_scales,
    decode,
    encode,
    round_bfloat16_to_codes,
    round_to_codes,
)
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, fake_quantize, quantize
from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme

CASTS = {
    "fp4": ml_dtypes.float4_e2m1fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
}
# Name -> (exponent bits, mantissa bits, signed), written once more.
FIELDS = {
    "fp4": (2, 1, True),
    "fp6_e3m2": (3, 2, True),
    "fp6_e2m3": (2, 3, True),
    "fp8_e5m3": (5, 3, False),
}
ONE = torch.tensor(1.0)


def exact(code, exponent_bits, mantissa_bits, signed):
    """The value of a code by the definition: (-1)^s 2^(e - bias) (1 + m / 2^M)."""
    mantissa = Fraction(code % (1 << mantissa_bits), 1 << mantissa_bits)
    exponent = (code >> mantissa_bits) % (1 << exponent_bits)
    negative = signed and code >> (mantissa_bits + exponent_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        magnitude = mantissa * Fraction(2) ** (1 - bias)
    else:
        magnitude = (1 + mantissa) * Fraction(2) ** (exponent - bias)
    return -magnitude if negative else magnitude


def finite_codes(name):
    """All codes up to the largest value: unsigned formats keep the rest for infinity and NaN."""
    fmt = Dtype[name].value
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32)
    return codes[decode(codes, fmt).abs() <= fmt.max_value]


def bits(x):
    return x.view(torch.int32)


@pytest.mark.parametrize("name", FIELDS)
def test_every_code_by_the_definition(name):
    codes = finite_codes(name).tolist()
    values = decode(torch.tensor(codes), Dtype[name].value)
    assert [Fraction(v) for v in values.tolist()] == [exact(c, *FIELDS[name]) for c in codes]


@pytest.mark.parametrize("name", CASTS)
def test_every_code_as_ml_dtypes(name):
    codes = np.arange(1 << Dtype[name].value.bits, dtype=np.uint8)
    expected = torch.from_numpy(codes.view(CASTS[name]).astype(np.float32))
    assert torch.equal(bits(decode(torch.from_numpy(codes), Dtype[name].value)), bits(expected))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.float32], ids=str)
def test_codes_come_back(name, kind):
    fmt = Dtype[name].value
    codes = finite_codes(name).to(kind)
    encoded = encode(decode(codes, fmt), fmt)
    assert encoded.dtype == torch.int32
    assert torch.equal(encoded, codes.to(torch.int32))


@pytest.mark.parametrize("name", FIELDS)
def test_codes_of_magnitudes_are_in_order(name):
    fmt = Dtype[name].value
    values = decode(torch.arange(1 << (fmt.bits - fmt.signed)), fmt)
    values = values[~values.isnan()]
    assert values[0] == 0 and (values.diff() > 0).all()


def test_e5m3_saturates_below_its_highest_binade():
    codes = finite_codes("fp8_e5m3")
    assert decode(codes, Dtype.fp8_e5m3.value).max() == Dtype.fp8_e5m3.value.max_value == 114688
    assert len(codes) == 255 and decode(torch.tensor([255]), Dtype.fp8_e5m3.value).isnan()


@pytest.mark.parametrize("name", CASTS)
def test_midpoints_go_to_even_as_ml_dtypes(name):
    fmt = Dtype[name].value
    values = decode(torch.arange(1 << (fmt.bits - 1)), fmt)
    middle = (values[:-1] + values[1:]) / 2
    ties = torch.cat([middle, -middle])
    below, above = (torch.nextafter(ties, ties.new_tensor(to)) for to in (-1e9, 1e9))
    x = torch.cat([ties, below, above])
    codes = quantize(x, ONE, None, Scheme(fmt))
    expected = x.numpy().astype(CASTS[name]).view(np.uint8)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == expected.tolist()
    assert (codes[: len(ties)] % 2 == 0).all()


@pytest.mark.parametrize("name", CASTS)
def test_random_values_as_ml_dtypes(name):
    fmt = Dtype[name].value
    x = torch.randn(20000) * torch.exp2(torch.randint(-6, 7, (20000,)).float())
    codes = quantize(x, ONE, None, Scheme(fmt))
    assert codes.tolist() == x.numpy().astype(CASTS[name]).view(np.uint8).tolist()


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("value", [1e30, float("inf")])
def test_saturates(name, value):
    fmt = Dtype[name].value
    codes = quantize(torch.tensor([value, -value]), ONE, None, Scheme(fmt))
    assert decode(codes, fmt).tolist() == [fmt.max_value, -fmt.max_value]


def test_unsigned_floats_take_negative_values_for_zero():
    scheme = Scheme(Dtype.fp8_e5m3.value)
    x, scale = torch.tensor([-2.0, -0.0, 1.0, 2.0]), torch.tensor(1.0)
    faked = fake_quantize(x, scale, None, scheme)
    assert faked.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert torch.equal(dequantize(quantize(x, scale, None, scheme), scale, None, scheme), faked)


@pytest.mark.parametrize("mode", RoundType)
@pytest.mark.parametrize("name", FIELDS)
def test_codes_of_rounded_values(name, mode):
    """Every finite bfloat16 value, and those around ties, give the codes of values on the grid."""
    fmt = Dtype[name].value
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    ties = (decode(finite_codes(name), fmt)[1:] + decode(finite_codes(name), fmt)[:-1]) / 2
    values = torch.cat([every[every.isfinite()], ties, -ties])
    values = torch.cat([values, values.nextafter(ONE), values.nextafter(-ONE)])
    expected = encode(round_to_grid_(values.clone(), fmt, mode), fmt)
    assert torch.equal(round_to_codes(values.clone(), fmt, mode), expected)


@pytest.mark.parametrize("name", CASTS)
def test_bits_of_bfloat16_give_the_codes_of_ml_dtypes(name):
    fmt = Dtype[name].value
    bits_of_all = torch.arange(-32768, 32768).to(torch.int16)
    x = bits_of_all[bits_of_all.view(torch.bfloat16).isfinite()]
    least, most = countable_scales(fmt)
    for scale in (least, 2.0**-7, 1.0, 2.0**90, most):
        wide = x.view(torch.bfloat16).double().numpy() / scale
        bounded = np.clip(wide, -fmt.max_value, fmt.max_value)
        expected = bounded.astype(CASTS[name]).view(np.uint8).astype(np.int16)
        codes = round_bfloat16_to_codes(x, torch.tensor([scale]), fmt)
        assert torch.equal(codes, torch.from_numpy(expected)), scale


@pytest.mark.parametrize("name", CASTS)
def test_infinity_in_bfloat16_saturates(name):
    fmt = Dtype[name].value
    x = torch.tensor([float("inf"), float("-inf")], dtype=torch.bfloat16).view(torch.int16)
    scale = torch.tensor([countable_scales(fmt)[1]])
    values = decode(round_bfloat16_to_codes(x, scale, fmt), fmt)
    assert values.tolist() == [fmt.max_value, -fmt.max_value]


@pytest.mark.parametrize("exponent", [-126, -60, 0, 60, 126])
@pytest.mark.parametrize("name", CASTS)
def test_codes_of_bfloat16_are_those_of_float32(name, exponent):
    scheme = Scheme(Dtype[name].value, QSchemeType.per_group, 1, 32, scale=E8M0)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = 2.0 ** torch.arange(-9, 9).reshape(6, 3)
    scale = (scale * 2.0**exponent).clamp(2.0**-127, 2.0**127)
    x = (x.double() * 2.0**exponent).bfloat16()
    codes = quantize(x, scale, None, scheme)
    assert codes.dtype == torch.uint8
    assert torch.equal(codes, quantize(x.float(), scale, None, scheme))
