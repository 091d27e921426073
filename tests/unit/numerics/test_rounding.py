"""Rounding against casts of torch and ml_dtypes, and against exact rational arithmetic."""

import math
from bisect import bisect_right
from fractions import Fraction
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.rounding import round_, round_to_grid_

INTEGERS = ["int8", "uint8", "int4", "uint4", "int3", "int2"]
FP8 = {
    "fp8_e4m3": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2),
}
each_fp8 = pytest.mark.parametrize("name", FP8)
each_mode = pytest.mark.parametrize("mode", RoundType, ids=lambda m: m.name)
quick = settings(deadline=None, derandomize=True, max_examples=200)


def decoded(name):
    """The 256 values of an 8-bit float, as torch reads their codes."""
    return torch.arange(256, dtype=torch.uint8).view(FP8[name][0]).float()


@cache
def grid(name):
    """The finite values of an 8-bit float, ascending."""
    values = decoded(name)
    return sorted({Fraction(v) for v in values[values.isfinite()].tolist()})


def exact(x, name, mode):
    """Round a number to the grid of an 8-bit float by definition."""
    values = grid(name)
    x = min(max(Fraction(x), values[0]), values[-1])
    low = bisect_right(values, x) - 1
    below, above = values[low], values[min(low + 1, len(values) - 1)]
    if mode is RoundType.floor or x - below < above - x:
        return below
    if x - below > above - x:
        return above
    if mode is RoundType.round:
        return max(below, above, key=abs)
    # Codes of one sign ascend from zero in steps of one: even codes are even places from there.
    return below if (low - values.index(0)) % 2 == 0 else above


def exact_integer(x, mode):
    """Round a number to an integer by definition."""
    x = Fraction(x)
    if mode is RoundType.floor:
        return math.floor(x)
    if mode is RoundType.half_even:
        return round(x)
    return (1 if x >= 0 else -1) * math.floor(abs(x) + Fraction(1, 2))


def same(a, b):
    """Whether two tensors are equal to the sign of zero."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def midpoints(name):
    """Halfway between neighbours of the grid: exact in float32."""
    values = grid(name)
    return torch.tensor([float((a + b) / 2) for a, b in pairwise(values)])


def around(x):
    """Each number between its neighbours in float32."""
    inf = torch.full_like(x, math.inf)
    return torch.cat([x, torch.nextafter(x, inf), torch.nextafter(x, -inf)])


@each_mode
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_codes_stay(name, mode):
    fmt = Dtype[name].value
    codes = torch.arange(fmt.qmin, fmt.qmax + 1, dtype=torch.float32)
    assert torch.equal(round_(codes.clone(), mode), codes)


@each_mode
@each_fp8
def test_float_codes_stay(name, mode):
    values = decoded(name)
    finite = values[values.isfinite()]
    assert len(finite) == {"fp8_e4m3": 254, "fp8_e5m2": 248}[name]
    assert same(round_to_grid_(finite.clone(), Dtype[name].value, mode), finite)


@each_fp8
def test_midpoints_go_to_even_as_casts_do(name):
    fmt, (kind, other) = Dtype[name].value, FP8[name]
    x = midpoints(name)
    rounded = round_to_grid_(x.clone(), fmt, RoundType.half_even)
    assert len(x) == len(grid(name)) - 1
    assert same(rounded, x.to(kind).float())
    assert same(rounded, torch.from_numpy(x.numpy().astype(other).astype(np.float32)))


@each_mode
@each_fp8
def test_midpoints_and_their_neighbours(name, mode):
    x = around(midpoints(name))
    rounded = round_to_grid_(x.clone(), Dtype[name].value, mode)
    assert rounded.tolist() == [float(exact(v, name, mode)) for v in x.tolist()]


@each_mode
@each_fp8
def test_around_powers_of_two(name, mode):
    """Where an exponent taken from a float32 logarithm is off by one."""
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    x = around(torch.cat([powers, -powers]))
    rounded = round_to_grid_(x.clone(), Dtype[name].value, mode)
    assert rounded.tolist() == [float(exact(v, name, mode)) for v in x.tolist()]


@each_mode
@each_fp8
@quick
@given(x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
@pytest.mark.sampled(3)
def test_any_float(name, mode, x):
    rounded = round_to_grid_(torch.tensor(x), Dtype[name].value, mode)
    assert rounded.tolist() == [float(exact(v, name, mode)) for v in x]


@each_mode
@each_fp8
def test_saturates(name, mode):
    fmt = Dtype[name].value
    top = fmt.max_value
    beyond = torch.tensor([top, top * 1.03, top * 1.1, top * 2, 3e38, math.inf])
    assert round_to_grid_(beyond.clone(), fmt, mode).tolist() == [top] * 6
    assert round_to_grid_(-beyond, fmt, mode).tolist() == [-top] * 6


@each_mode
@each_fp8
def test_nan_stays_nan_and_alone(name, mode):
    x = torch.tensor([1.0, math.nan, -2.0, -math.nan])
    rounded = round_to_grid_(x, Dtype[name].value, mode)
    assert rounded.isnan().tolist() == [False, True, False, True]
    assert rounded[::2].tolist() == [1.0, -2.0]


@each_fp8
def test_below_the_smallest_subnormal(name):
    smallest = float(min(v for v in grid(name) if v > 0))
    half = torch.tensor([smallest / 2, -smallest / 2])
    fmt = Dtype[name].value
    assert same(round_to_grid_(half.clone(), fmt, RoundType.half_even), torch.tensor([0.0, -0.0]))
    assert round_to_grid_(half.clone(), fmt, RoundType.round).tolist() == [smallest, -smallest]
    assert round_to_grid_(half.clone(), fmt, RoundType.floor).tolist() == [0.0, -smallest]
    float32_subnormal = torch.tensor([1e-45, -1e-45])
    assert round_to_grid_(float32_subnormal, fmt, RoundType.half_even).tolist() == [0.0, 0.0]


@each_mode
@each_fp8
def test_zero_keeps_its_sign(name, mode):
    zeros = torch.tensor([0.0, -0.0])
    assert same(round_to_grid_(zeros.clone(), Dtype[name].value, mode), zeros)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (RoundType.half_even, [-2, -2, 0, 0, 2, 2, 4]),
        (RoundType.round, [-3, -2, -1, 1, 2, 3, 4]),
        (RoundType.floor, [-3, -2, -1, 0, 1, 2, 3]),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_integer_ties(mode, expected):
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    assert round_(x, mode).tolist() == expected


@each_mode
@quick
@given(x=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1))
def test_any_float_to_integer(mode, x):
    assert round_(torch.tensor(x), mode).tolist() == [exact_integer(v, mode) for v in x]


@each_mode
def test_integers_where_adding_one_half_would_round(mode):
    below_half = math.nextafter(0.5, 0)
    x = torch.tensor([below_half, 8388609.0, 8388607.5, 4194303.25, 16777217.0, 2.0**31])
    x = around(torch.cat([x, -x]))
    assert round_(x.clone(), mode).tolist() == [exact_integer(v, mode) for v in x.tolist()]


@each_mode
def test_integers_leave_infinity_and_nan(mode):
    x = round_(torch.tensor([math.inf, -math.inf, math.nan]), mode)
    assert x[:2].tolist() == [math.inf, -math.inf] and x[2].isnan()


@each_mode
def test_in_place(mode):
    x = torch.randn(8)
    assert round_(x, mode) is x
    assert round_to_grid_(x, Dtype.fp8_e4m3.value, mode).data_ptr() == x.data_ptr()


@each_mode
def test_on_a_view(mode):
    x = torch.randn(6, 8)
    expected = round_to_grid_(x.t().contiguous(), Dtype.fp8_e5m2.value, mode)
    assert same(round_to_grid_(x.t(), Dtype.fp8_e5m2.value, mode), expected)
    assert same(x.t(), expected)
