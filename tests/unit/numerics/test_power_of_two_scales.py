"""Scales rounded to the nearest power of two."""

from fractions import Fraction

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scale_formats import FLOAT32, POF2
from quark.torch.numerics.scales import round_scale
from quark.torch.numerics.scheme import Scheme

NAMES = ["int8", "uint4", "int2", "fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4"]


def is_power_of_two(x):
    return (torch.frexp(x.float()).mantissa == 0.5).all()


@pytest.mark.parametrize(
    ("name", "symmetric"),
    [(name, s) for name in NAMES for s in (True, False) if s or "int" in name],
)
def test_scales_are_the_nearest_powers_of_two(name, symmetric):
    options = {"qscheme": QSchemeType.per_channel, "symmetric": symmetric}
    exact = Scheme(Dtype[name].value, scale=FLOAT32, **options)
    rounded = Scheme(Dtype[name].value, scale=POF2, **options)
    x = torch.randn(200, 16) * torch.exp2(torch.randn(200, 1) * 8)
    wanted, scale = dynamic_qparams(x, exact)[0], dynamic_qparams(x, rounded)[0]
    assert scale.dtype == torch.float32 and is_power_of_two(scale)
    # Nearest by exponent: the ratio is within the square root of two either way.
    for a, b in zip(scale.tolist(), wanted.tolist(), strict=True):
        assert Fraction(1, 2) <= (Fraction(a) / Fraction(b)) ** 2 <= 2


@pytest.mark.parametrize("exponent", [-126, -20, -1, 0, 1, 30, 127])
def test_the_bound_is_the_square_root_of_two(exponent):
    power = torch.tensor(2.0**exponent)
    assert round_scale(power, POF2) == power
    if exponent < 127:
        below = torch.tensor(1.4142135).mul(power)  # sqrt(2) lies between these two
        above = torch.tensor(1.4142136).mul(power)
        assert round_scale(torch.stack([below, above]), POF2).tolist() == [power, 2 * power]


def test_what_has_no_finite_reciprocal_becomes_the_smallest_normal_number():
    scales = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126])
    assert round_scale(scales, POF2).tolist() == [2.0**-126] * 4


def test_quantized_integers_are_whole_steps():
    scheme = Scheme(Dtype.int8.value, scale=POF2)
    x = torch.randn(64, 64)
    scale, zero_point = dynamic_qparams(x, scheme)
    steps = fake_quantize(x, scale, zero_point, scheme) / scale
    assert torch.equal(steps, (x / scale).round().clamp(-128, 127))
