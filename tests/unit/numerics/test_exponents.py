"""Shared exponents against exact fractions, at powers of two and at both ends of the range."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.exponents import (
    MAX_EXPONENT,
    MIN_EXPONENT,
    exponent_of,
    power_of_two,
    shared_exponent,
)
from quark.torch.numerics.formats import Dtype

# Name -> (exponent of the largest value, mantissa bits), of the elements of MX formats.
ELEMENTS = {
    "fp4": (2, 1),
    "fp6_e3m2": (4, 2),
    "fp6_e2m3": (2, 3),
    "fp8_e4m3": (8, 3),
    "fp8_e5m2": (15, 2),
}
MODES = ["floor", "even", "ceil"]
NORMAL = 2.0**-126
HUGE = torch.finfo(torch.float32).max


def floor_log2(x):
    """floor(log2(x)) of a positive fraction, exactly."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def oracle(amax, name, mode):
    """The exponent of the scale by its definition, in fractions."""
    largest, mantissa = ELEMENTS[name]
    exact = Fraction(amax)
    if amax < NORMAL:
        return MIN_EXPONENT
    exponent = floor_log2(exact)
    if mode == "ceil" and exact != Fraction(2) ** exponent:
        exponent += 1
    if mode == "even":
        step = Fraction(2) ** (exponent - mantissa)
        rounded = (exact / step + Fraction(1, 2)).__floor__() * step  # half up
        exponent = floor_log2(rounded)
    return min(max(exponent - largest, MIN_EXPONENT), MAX_EXPONENT)


def around(x):
    """Values with their neighbours on both sides."""
    ends = x.new_tensor(0.0), x.new_tensor(float("inf"))
    return torch.cat([x, *(torch.nextafter(x, end) for end in ends)])


def shared(values, name, mode):
    return shared_exponent(values, Dtype[name].value, mode).tolist()


def test_exponent_of_powers_of_two_and_their_neighbours():
    powers = torch.arange(-126, 128)
    x = torch.exp2(powers.double()).float()
    assert torch.equal(exponent_of(x), powers.int())
    assert torch.equal(exponent_of(-x), powers.int())
    below = torch.nextafter(x[1:], torch.tensor(0.0))
    assert torch.equal(exponent_of(below), powers[1:].int() - 1)
    above = torch.nextafter(x, torch.tensor(float("inf")))
    assert torch.equal(exponent_of(above), powers.int())


def test_zero_and_subnormals_have_the_lowest_exponent():
    x = torch.tensor([0.0, -0.0, 2.0**-127, 2.0**-149, -(2.0**-130)])
    assert exponent_of(x).tolist() == [-127] * 5


def test_powers_of_two_are_exact():
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    values = power_of_two(exponents)
    assert values.dtype == torch.float32
    assert [Fraction(v) for v in values.tolist()] == [Fraction(2) ** e for e in exponents.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_shared_exponent_of_every_binade(name, mode):
    powers = torch.exp2(torch.arange(-126, 128).double()).float()
    carry = powers * (2 - 2.0 ** -(ELEMENTS[name][1] + 1))  # from here on "even" goes up
    x = torch.cat([around(powers), around(carry), powers * 1.5])
    x = x[x.isfinite() & (x >= NORMAL)]
    assert shared(x, name, mode) == [oracle(v, name, mode) for v in x.tolist()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ELEMENTS)
@settings(deadline=None, derandomize=True, max_examples=100)
@given(amax=st.floats(0, HUGE, width=32, allow_subnormal=False))
def test_shared_exponent_of_any_float(name, mode, amax):
    assert shared(torch.tensor([amax]), name, mode) == [oracle(amax, name, mode)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ELEMENTS)
def test_zero_blocks_and_subnormal_ones(name, mode):
    x = torch.tensor([0.0, 2.0**-149, 2.0**-130, 2.0**-127])
    assert shared(x, name, mode) == [MIN_EXPONENT] * 4


@pytest.mark.parametrize(
    ("name", "mode", "amax", "exponent"),
    [
        ("fp4", "even", 1.74, -2),
        ("fp4", "even", 1.75, -1),
        ("fp4", "even", 6.0, 0),
        ("fp4", "even", 7.0, 1),
        ("fp4", "floor", 7.99, 0),
        ("fp4", "ceil", 4.0, 0),
        ("fp4", "ceil", 4.01, 1),
        ("fp6_e2m3", "even", 1.93, -2),
        ("fp6_e2m3", "even", 1.9375, -1),
        ("fp6_e3m2", "even", 1.875, -3),
        ("fp8_e4m3", "floor", 448.0, 0),
        ("fp8_e5m2", "floor", 57344.0, 0),
    ],
)
def test_known_exponents(name, mode, amax, exponent):
    assert shared(torch.tensor([amax]), name, mode) == [exponent]


@pytest.mark.parametrize("mode", MODES)
def test_the_top_of_the_range_is_the_largest_exponent(mode):
    # Elements of exponent 0 leave no room: rounding 2^128 up would not be a number.
    assert shared_exponent(torch.tensor([HUGE]), Dtype.mx.value, mode).tolist() == [127]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_counts_as_large(mode, value):
    # The largest exponent: a small one would saturate the finite values of the block.
    assert shared(torch.tensor([value]), "fp4", mode)[0] >= MAX_EXPONENT - 2


@pytest.mark.parametrize("mode", ["even", "floor", "ceil"])
def test_shared_exponents_of_any_nan_are_those_of_infinity(mode):
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    exponents = shared_exponent(bits.view(torch.float32), Dtype.fp4.value, mode)
    infinite = shared_exponent(torch.tensor([float("inf")]), Dtype.fp4.value, mode)
    assert exponents.unique().equal(infinite)
