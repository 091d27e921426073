"""Scale and zero point: known numbers, formulas in exact arithmetic, and degenerate data."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quark.torch.numerics.dtypes import type_name
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scale_formats import ScaleFormat, ScaleType
from quark.torch.numerics.scales import EPS, block_range, qparams_from_range, represented_range
from quark.torch.numerics.scheme import Scheme
from tests.unit.numerics.kinds import FLOATS, INTEGERS, cast, largest

# The others are in test_wide_integers.py, test_block_formats.py and test_scale_codec.py.
SCALED = [*INTEGERS, *FLOATS]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
each_integer = pytest.mark.parametrize("name", INTEGERS)
each_symmetry = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
each_type = pytest.mark.parametrize("kind", TYPES, ids=str)
quick = settings(deadline=None, derandomize=True, max_examples=100)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-(2.0**60), 2.0**60, width=32)


def solve(lo, hi, name, **options):
    """Scale and zero point of one range."""
    scheme = Scheme(Dtype[name].value, **options)
    return qparams_from_range(torch.tensor(float(lo)), torch.tensor(float(hi)), scheme)


def in_float32(x):
    """Round an exact number to float32 once."""
    return float(np.float32(np.longdouble(x.numerator) / np.longdouble(x.denominator)))


@pytest.mark.parametrize(
    ("name", "symmetric", "scale", "zero_point"),
    [
        ("int8", True, 0.02369095, 0),
        ("int4", True, 0.40274611, 0),
        ("uint8", True, 0.02369095, 128),
        ("uint4", True, 0.40274611, 8),
        ("int8", False, 0.02085858, 17),
        ("uint8", False, 0.02085858, 145),
        ("int4", False, 0.35459587, 1),
        ("uint4", False, 0.35459587, 9),
        ("fp8_e4m3", True, 0.00674240, None),
        ("fp8_e5m2", True, 5.2675e-05, None),
    ],
)
def test_known_numbers(name, symmetric, scale, zero_point):
    """A random tensor with extremes -3.0205958 and 2.2983422."""
    found, offset = solve(-3.0205958, 2.2983422, name, symmetric=symmetric)
    assert found.item() == pytest.approx(scale, rel=2e-6)
    assert (None if offset is None else offset.item()) == zero_point


@each_integer
@quick
@given(lo=ordinary, hi=ordinary)
def test_symmetric_formula(name, lo, hi):
    assume(lo <= hi)
    fmt = Dtype[name].value
    amax = max(abs(Fraction(lo)), abs(Fraction(hi)))
    scale, zero_point = solve(lo, hi, name)
    expected = in_float32(amax / Fraction(fmt.qmax - fmt.qmin, 2))
    assert scale.item() == max(expected, EPS)
    assert zero_point.item() == {"int": 0, "uin": 1 << (fmt.bits - 1)}[name[:3]]


@each_integer
@quick
@given(lo=ordinary, hi=ordinary)
def test_asymmetric_formula(name, lo, hi):
    assume(lo <= hi)
    fmt = Dtype[name].value
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    scale, zero_point = solve(lo, hi, name, symmetric=False)
    span = Fraction(float(np.float32(hi) - np.float32(lo)))  # rounded, as any float32 difference
    assert scale.item() == max(in_float32(span / (fmt.qmax - fmt.qmin)), EPS)
    step = float(np.float32(lo) / np.float32(scale.item()))
    assert zero_point.item() == min(max(fmt.qmin - round(step), fmt.qmin), fmt.qmax)
    assert zero_point.dtype == torch.int32


@pytest.mark.parametrize("name", FLOATS)
@quick
@given(lo=ordinary, hi=ordinary)
def test_float_formula(name, lo, hi):
    assume(lo <= hi and max(-lo, hi) > 1e-20)
    scale, zero_point = solve(lo, hi, name)
    assert scale.item() == in_float32(Fraction(max(-lo, hi)) / Fraction(float(largest(name))))
    assert zero_point is None


@each_integer
def test_fractional_zero_point(name):
    fmt = Dtype[name].value
    scale, zero_point = solve(-1.0, 2.0, name, symmetric=False, float_zero_point=True)
    assert zero_point.dtype == torch.float32
    assert scale.item() == pytest.approx(3.0 / (fmt.qmax - fmt.qmin), rel=1e-6)
    assert zero_point.item() == pytest.approx(fmt.qmin + (fmt.qmax - fmt.qmin) / 3, abs=1e-4)


@each_integer
@pytest.mark.parametrize(("lo", "hi"), [(2.0, 6.0), (-6.0, -2.0)])
def test_ranges_are_widened_to_zero(name, lo, hi):
    widened = (0.0, 6.0) if lo > 0 else (-6.0, 0.0)
    for symmetric in (True, False):
        found = solve(lo, hi, name, symmetric=symmetric)
        assert found == solve(*widened, name, symmetric=symmetric)
    fmt = Dtype[name].value
    assert found[1].item() == (fmt.qmin if lo > 0 else fmt.qmax)


DEGENERATE = {
    "zero": (0.0, 0.0),
    "minus zero": (-0.0, -0.0),
    "subnormal": (-1e-45, 1e-45),
    "tiny": (-1e-38, 1e-38),
    "small": (0.0, 1e-8),
    "constant": (3.0, 3.0),
    "negative constant": (-3.0, -3.0),
    "large": (-1e9, 1e9),
    "huge": (-1e38, 1e38),
    "largest": (-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max),
}


@each_type
@each_symmetry
@pytest.mark.parametrize("name", SCALED)
def test_degenerate_ranges(name, symmetric, kind):
    for case, (lo, hi) in DEGENERATE.items():
        scale, zero_point = solve(
            lo, hi, name, symmetric=symmetric, scale=ScaleFormat(type_name(kind))
        )
        assert scale.dtype == kind, case
        assert scale.isfinite() and scale > 0 and scale.float().reciprocal().isfinite(), case
        if zero_point is not None:
            fmt = Dtype[name].value
            assert fmt.qmin <= zero_point.item() <= fmt.qmax, case


@settings(quick, max_examples=500)
@given(
    name=st.sampled_from(SCALED),
    symmetric=st.booleans(),
    kind=st.sampled_from(TYPES),
    lo=finite,
    hi=finite,
)
def test_any_range(name, symmetric, kind, lo, hi):
    assume(lo <= hi)
    scale, zero_point = solve(lo, hi, name, symmetric=symmetric, scale=ScaleFormat(type_name(kind)))
    assert scale.isfinite() and scale > 0
    assert zero_point is None or zero_point.isfinite()


@pytest.mark.parametrize("name", SCALED)
def test_all_zeros(name):
    """The smallest scale, zeros in the lowest code when asymmetric, and zeros back."""
    x = torch.zeros(2, 8)
    scheme = Scheme(Dtype[name].value, symmetric=False)
    scale, zero_point = dynamic_qparams(x, scheme)
    assert scale.item() == 1.1920928955078125e-07
    assert zero_point is None or zero_point.item() == scheme.fmt.qmin
    assert torch.equal(fake_quantize(x, scale, zero_point, scheme), x)


@pytest.mark.parametrize("name", INTEGERS)
def test_range_as_wide_as_float32_allows(name):
    """The sum of both ends overflows, the scale does not."""
    fmt = Dtype[name].value
    top = torch.tensor(0.6 * torch.finfo(torch.float32).max).item()  # no code is beyond float32
    for symmetric in (True, False):
        scale, zero_point = solve(-top, top, name, symmetric=symmetric)
        assert scale.item() == in_float32(Fraction(top) * 2 / (fmt.qmax - fmt.qmin))
        assert zero_point in (0, (fmt.qmin + fmt.qmax) // 2, (fmt.qmin + fmt.qmax + 1) // 2)


@each_type
@each_symmetry
@pytest.mark.parametrize("name", SCALED)
def test_the_stored_scale_is_the_one_used(name, symmetric, kind):
    """Quantized values are whole steps of the scale as rounded to its type."""
    scheme = Scheme(
        Dtype[name].value,
        QSchemeType.per_channel,
        0,
        symmetric=symmetric,
        scale=ScaleFormat(type_name(kind)),
    )
    x = torch.randn(16, 64)
    scale, zero_point = dynamic_qparams(x, scheme)
    steps = fake_quantize(x, scale, zero_point, scheme) / scale.float()[:, None]
    codes = steps.round() if name in INTEGERS else torch.from_numpy(cast(steps.numpy(), name))
    assert torch.equal(codes * scale.float()[:, None], steps * scale.float()[:, None])
    assert torch.allclose(codes, steps, rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1.0, 1e-4], ids=["normal", "subnormal in float16"])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
def test_scales_are_rounded_once_and_zero_points_follow(kind, magnitude):
    lo, hi = -magnitude * torch.rand(500), magnitude * torch.rand(500)
    scheme = Scheme(Dtype.uint8.value, symmetric=False, scale=ScaleFormat(type_name(kind)))
    exact, offset = qparams_from_range(lo, hi, Scheme(Dtype.uint8.value, symmetric=False))
    scale, zero_point = qparams_from_range(lo, hi, scheme)
    assert torch.equal(scale, exact.to(kind))
    assert torch.equal(zero_point, (-lo / scale.float()).round().clamp(0, 255).int())
    assert not torch.equal(zero_point, offset), "the case cannot tell which scale was used"


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, -1])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_range_of_each_group(axis, group, kind):
    x = torch.randn(3, 5, 4).to(kind)
    scheme = Scheme(Dtype.int8.value, QSchemeType.per_group, axis, group)
    lo, hi = block_range(x, scheme)
    size = x.shape[axis] if group == -1 else group
    found = {}
    for index in itertools.product(*map(range, x.shape)):
        place = tuple(i // size if a == axis else i for a, i in enumerate(index))
        found.setdefault(place, []).append(float(x[index]))
    assert lo.shape == hi.shape == scheme.scale_shape(x.shape)
    assert lo.dtype == hi.dtype == torch.float32
    for place, values in found.items():
        padding = [0.0] * (len(values) < size)  # a ragged group is filled up with zeros
        assert lo[place].item() == min(values + padding)
        assert hi[place].item() == max(values + padding)


@pytest.mark.parametrize(
    ("options", "dims"),
    [
        ({}, (0, 1, 2)),
        ({"qscheme": QSchemeType.per_channel, "axis": 0}, (1, 2)),
        ({"qscheme": QSchemeType.per_channel, "axis": 1}, (0, 2)),
        ({"qscheme": QSchemeType.per_channel, "axis": -1}, (0, 1)),
        ({"per_token": True}, (2,)),
    ],
    ids=["tensor", "channel 0", "channel 1", "channel -1", "token"],
)
def test_range_of_whole_axes(options, dims):
    x = torch.randn(4, 5, 6)
    scheme = Scheme(Dtype.int8.value, **options)
    lo, hi = block_range(x, scheme)
    assert torch.equal(lo.flatten(), x.amin(dims).flatten())
    assert torch.equal(hi.flatten(), x.amax(dims).flatten())
    assert lo.shape == hi.shape == scheme.scale_shape(x.shape)


def test_nan_reaches_its_range_alone():
    x = torch.ones(3, 8)
    x[1, 3] = math.nan
    lo, hi = block_range(x, Scheme(Dtype.int8.value, QSchemeType.per_channel, 0))
    assert lo.isnan().tolist() == hi.isnan().tolist() == [False, True, False]


# Documented name -> type of a scale in memory, all its numbers if they are few, and how far (in the
# logarithm) a scale is from that of float32 at most.
POWERS = [2.0**e for e in range(-127, 128)]
E5M3_NUMBERS = [m * 2.0 ** (e - 3) for e in range(-14, 17) for m in range(8, 16)]
SCALE_TYPES = {
    "float": (torch.float32, None, 0),
    "float32": (torch.float32, None, 0),
    "float16": (torch.float16, None, 2.0**-10),
    "bfloat16": (torch.bfloat16, None, 2.0**-7),
    "pof2": (torch.float32, POWERS, 0.5),
    "power_of_2": (torch.float32, POWERS, 0.5),
    "float8_e8m0fnu": (torch.float32, POWERS, 0.78),
    "float8_e5m3": (torch.float32, E5M3_NUMBERS, 0.1),
}


def test_every_scale_type_is_tested_here():
    assert set(SCALE_TYPES) == set(ScaleType.__members__)


@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_scale_types(scale_type):
    """Scales are numbers of their type, near those of float32."""
    kind, numbers, bound = SCALE_TYPES[scale_type]
    amax = torch.exp2(torch.rand(200) * 20 - 10)
    scheme = Scheme(Dtype.fp4.value, QSchemeType.per_channel, scale=ScaleType[scale_type].format)
    scale, _ = qparams_from_range(-amax, amax / 3, scheme)
    assert scale.dtype == kind
    assert numbers is None or set(scale.tolist()) <= set(numbers)
    assert (scale.float() / (amax / 6)).log2().abs().max() <= bound


@pytest.mark.parametrize("name", SCALED)
@each_symmetry
def test_the_range_that_a_scale_represents(name, symmetric):
    """It has the scale and the zero point that it comes from."""
    fmt = Dtype[name].value
    if fmt.is_float and not symmetric:
        pytest.skip("floats have no zero point")
    scheme = Scheme(fmt, symmetric=symmetric)
    lo, hi = torch.tensor([-1.0, -0.02, 0.0]), torch.tensor([0.3, 5.0, 2.5])
    scale, zero_point = qparams_from_range(lo, hi, scheme)
    again, zero_again = qparams_from_range(*represented_range(scale, zero_point, scheme), scheme)
    torch.testing.assert_close(again, scale, rtol=1e-6, atol=0)
    assert zero_point is None or zero_again.tolist() == zero_point.tolist()
