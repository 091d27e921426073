"""Codes by kernels are those by operations of torch, and by definition."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.numpy import arrays

from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.native import codes as native_codes
from quark.torch.numerics.native.codes import find_codes
from quark.torch.numerics.qdq import dynamic_qparams, quantize
from quark.torch.numerics.scale_formats import E4M3, E8M0, POF2
from quark.torch.numerics.scheme import Scheme
from tests.unit.numerics.kinds import FLOATS, INTEGERS, NATIVE, encode, largest

TYPES = [torch.bfloat16, torch.float16, torch.float32]
GRANULARITIES = {
    "tensor": {},
    "channel": {"qscheme": QSchemeType.per_channel},
    "group": {"qscheme": QSchemeType.per_group, "axis": -1, "group": 16},
    "ragged group": {"qscheme": QSchemeType.per_group, "axis": -1, "group": 40},
    "block": {"qscheme": QSchemeType.per_block, "block": (16, 32)},
    "token": {"per_token": True},
    "last channel": {"qscheme": QSchemeType.per_channel, "axis": -1},
    "short group": {"qscheme": QSchemeType.per_group, "axis": -1, "group": 4},
}
NOT_SERVED = {"last channel", "short group"}
VARIANTS = {
    "symmetric": {},
    "asymmetric": {"symmetric": False},
    "float zero point": {"symmetric": False, "float_zero_point": True},
    "powers of two": {"scale": POF2},
}


@pytest.fixture
def by_torch(monkeypatch):
    """A function that quantizes without kernels."""

    def call(*args):
        with monkeypatch.context() as changed:
            changed.setenv("QUARK_KERNELS", "torch")
            return quantize(*args)

    return call


def bits(x):
    return x.view(torch.uint8) if x.itemsize == 1 else x.view(torch.int16)


def assert_same(mine, others):
    assert mine is not None
    assert (mine.shape, mine.dtype) == (others.shape, others.dtype)
    assert torch.equal(bits(mine), bits(others))


def sample(dtype, *shape):
    """Values around zero, whose blocks have different ranges."""
    return (torch.randn(*shape) * torch.rand(shape[0], 1).mul(8).exp2()).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.sampled(3)
def test_integers(name, variant, dtype, any_size, by_torch):
    for key, granularity in GRANULARITIES.items():
        scheme = Scheme(Dtype[name].value, **granularity, **VARIANTS[variant])
        x = sample(dtype, 48, 104)
        qparams = dynamic_qparams(x, scheme)
        mine = find_codes(x, *qparams, scheme)
        if key in NOT_SERVED:
            assert mine is None
        else:
            assert_same(mine, by_torch(x, *qparams, scheme))
            assert_same(quantize(x, *qparams, scheme), mine)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, dtype, any_size, by_torch):
    fmt = Dtype[name].value
    for key, granularity in GRANULARITIES.items():
        for variant in ({}, {"scale": POF2}, {"scale": E8M0}, {"scale": E4M3}):
            scheme = Scheme(fmt, **granularity, **variant)
            x = sample(dtype, 48, 104)
            qparams = dynamic_qparams(x, scheme)
            mine = find_codes(x, *qparams, scheme)
            if key in NOT_SERVED:
                assert mine is None
            else:
                assert_same(mine, by_torch(x, *qparams, scheme))


@pytest.mark.parametrize("name", ["mx", "mx6", "mx9", "bfp16"])
def test_shared_exponents(name, any_size, by_torch):
    """Blocks of 8 and more are served; sub-blocks of two elements are not."""
    fmt = Dtype[name].value
    group = {"qscheme": QSchemeType.per_group, "axis": -1, "group": fmt.block or 32}
    scheme = Scheme(fmt, **group, scale=Scheme(fmt).scale if fmt.block else E8M0)
    x = sample(torch.bfloat16, 32, 96)
    qparams = dynamic_qparams(x, scheme)
    mine = find_codes(x, *qparams, scheme)
    if fmt.sub_block:
        assert mine is None
    else:
        assert_same(mine, by_torch(x, *qparams, scheme))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (i + j) % 2 else pytest.mark.nightly)
        for i, name in enumerate(["int4", "uint4", "int8", "uint8", "int16", *FLOATS])
        for j, dtype in enumerate([torch.bfloat16, torch.float16])
    ],
)
def test_every_value(name, dtype, any_size, by_torch):
    """Each value, under scales from the smallest to large ones, and infinite ones too."""
    fmt = Dtype[name].value
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    if name in FLOATS and name not in NATIVE:
        x = x[~x.isnan()]  # these formats have no code for it
    powers = [2.0**-128, 2.0**-126, 2.0**-3, 1.0, 2.0**100]
    cases = [({}, s) for s in [*powers, 1e-5, 0.37, 3e4]]
    cases += [({"symmetric": False}, s) for s in (1e-5, 0.37, 3e4)]
    for variant, scale in [*cases, *(({"scale": POF2}, s) for s in powers)]:
        scheme = Scheme(fmt, **variant)
        zero_point = torch.tensor(3) if not fmt.is_float else None
        given = x, torch.tensor(scale), zero_point, scheme
        assert_same(find_codes(*given), by_torch(*given))


@pytest.mark.parametrize("name", FLOATS)
def test_floats_by_another_implementation(name, any_size):
    """Values, ties and values beside ties, with and beyond the largest."""
    fmt = Dtype[name].value
    grid = np.arange(0, 4 * 2**fmt.mantissa_bits + 1) * 2.0 ** (
        fmt.min_exponent - fmt.mantissa_bits
    )
    ties = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate([grid, ties, largest(name) * np.linspace(0.5, 1, 99)])
    values = values.astype(np.float32)
    beside = [np.nextafter(values, np.float32(end)) for end in (-np.inf, np.inf)]
    values = np.concatenate([values, *beside, -values])
    values = values[np.abs(values) <= largest(name)]
    codes = find_codes(torch.from_numpy(values), torch.tensor(1.0), None, Scheme(fmt))
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), encode(values, name))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    x=arrays(np.float32, (3, 35), elements=st.floats(-300, 300, width=32)),
    zero_point=st.integers(-(2**20), 2**20),
    scale=st.floats(2.0**-10, 2.0**10, width=32),
)
def test_integers_by_definition(x, zero_point, scale, any_size):
    scheme = Scheme(Dtype.uint8.value, symmetric=False)
    given = torch.from_numpy(x), torch.tensor(scale), torch.tensor(zero_point), scheme
    by_definition = np.rint(x * (np.float32(1) / np.float32(scale))) + np.float32(zero_point)
    expected = np.clip(by_definition, 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(find_codes(*given).numpy(), expected)


def test_any_rank_and_number_of_threads(any_size, by_torch):
    for shape in [(64,), (5, 7, 48), (2, 3, 4, 16)]:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            x = torch.randn(shape)
            scheme = Scheme(Dtype.int8.value, QSchemeType.per_channel)
            qparams = dynamic_qparams(x, scheme)
            if len(shape) > 1:
                assert_same(find_codes(x, *qparams, scheme), by_torch(x, *qparams, scheme))
            scheme = replace(scheme, qscheme=QSchemeType.per_tensor)
            qparams = dynamic_qparams(x, scheme)
            assert_same(find_codes(x, *qparams, scheme), by_torch(x, *qparams, scheme))


@pytest.mark.parametrize(
    ("x", "zero_point", "change"),
    [
        (torch.randn(8, 64), None, {"rounding": RoundType.floor}),
        (torch.randn(8, 64), None, {"rounding": RoundType.round}),
        (torch.randn(8, 64), None, {"fmt": Dtype.int32.value}),
        (torch.randn(8, 64), None, {"fmt": Dtype.bfloat16.value}),
        (torch.randn(8, 64), None, {"fmt": Dtype.fp8_e5m3.value}),
        (torch.randn(8, 64).double(), None, {}),
        (torch.randn(64, 8).T, None, {}),
        (torch.randn(8, 64), torch.tensor(2**20 + 1), {"fmt": Dtype.uint8.value}),
        (torch.randn(8, 64), torch.tensor(float("nan")), {"fmt": Dtype.uint8.value}),
    ],
    ids=["floor", "away", "wide", "cast", "unsigned", "double", "strided", "zero", "NaN"],
)
def test_what_is_left_to_torch(x, zero_point, change, any_size):
    scheme = replace(Scheme(Dtype.int8.value), **change)
    assert find_codes(x, torch.tensor(0.1), zero_point, scheme) is None
    assert (
        find_codes(torch.randn(8, 64), torch.tensor(0.1), None, Scheme(Dtype.int8.value))
        is not None
    )


def test_powers_of_two_multiply_where_the_reciprocal_is_exact():
    scheme = Scheme(Dtype.fp4.value, scale=POF2)
    assert native_codes._factor(torch.tensor(4.0), scheme) == (torch.tensor(0.25), False)
    assert native_codes._factor(torch.tensor(2.0**-128), scheme) == (torch.tensor(2.0**-128), True)
    scheme = replace(scheme, scale=Scheme(Dtype.fp4.value).scale)
    assert native_codes._factor(torch.tensor(4.0), scheme) == (torch.tensor(4.0), True)


def test_a_scale_of_another_shape_is_refused(any_size):
    scheme = Scheme(Dtype.int8.value, QSchemeType.per_channel)
    with pytest.raises(ValueError, match="has 8 blocks"):
        quantize(torch.randn(8, 64), torch.ones(7), None, scheme)


class TestExactInverses:
    X = torch.tensor([1.0, -3.0, 1.9999999, 2.0**-126, 2.0**-60, 3.0e38])

    @pytest.mark.parametrize("exponent", range(-126, 127))
    def test_products_with_reciprocals_are_quotients(self, exponent):
        scale = torch.full((6,), 2.0**exponent)
        assert native_codes._have_exact_inverses(scale)
        assert torch.equal(self.X * scale.reciprocal(), self.X / scale)

    @pytest.mark.parametrize(
        "scale", [0.0, 3.0, 2.0**-149, 2.0**-127, 2.0**127, float("inf"), float("nan")]
    )
    def test_other_scales_divide(self, scale):
        assert not native_codes._have_exact_inverses(torch.tensor([1.0, scale, 0.5]))
