"""The fit of super-blocks, beside ranges and a search over all scales and minima of a block."""

from dataclasses import replace

import pytest
import torch

from quark.torch.numerics.qdq import fake_quantize
from quark.torch.numerics.scale_formats import FLOAT32
from quark.torch.numerics.scales import qparams_from_range
from quark.torch.numerics.super_block_fit import fit
from quark.torch.numerics.super_blocks import factors, minima
from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES
from quark.torch.quantization.observer.registry import observer_class

# Bounds of the squared error of Gaussian weights, relative to that of ranges.
GAINS = {"q2_k": 0.68, "q3_k": 0.9, "q4_k": 0.85, "q5_k": 0.88, "q6_k": 0.9}
NAMES = list(GAINS)


def weights(rows=16, columns=512, scale=0.02):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) * scale


def observed(spec, x, observer="SuperBlockObserver"):
    found = observer_class(observer)(spec)
    found(x)
    return found.calculate_qparams()


def error(spec, x, qparams):
    return float((fake_quantize(x, *qparams, spec.scheme) - x).square().sum())


@pytest.mark.parametrize("name", NAMES)
def test_less_error_than_ranges(name):
    spec, x = BLOCK_SCHEMES[name].spec(), weights()
    ranges = error(spec, x, observed(spec, x, "PerGroupMinMaxObserver"))
    searched = error(spec, x, observed(spec, x, "PerGroupMSEObserver"))
    fitted = error(spec, x, observed(spec, x))
    assert fitted < GAINS[name] * ranges
    assert fitted < searched


@pytest.mark.parametrize("name", NAMES)
def test_scales_and_minima_are_integers_times_a_number(name):
    spec = BLOCK_SCHEMES[name].spec()
    to = spec.scheme.scale
    x = weights()
    x[0, :64] = 0
    x[1] = x[1].abs()  # no minimum is above zero
    scale, zero_point = observed(spec, x)
    factors(scale, to.fmt, to.span)  # raises where there are none
    if not spec.symmetric:
        products = minima(scale, zero_point, to.fmt)
        factors(products, to.fmt, to.span)
        assert products.min() >= 0
    assert fake_quantize(x, scale, zero_point, spec.scheme)[0, :64].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
def test_other_places_in_a_tensor_change_nothing(name):
    spec, x = BLOCK_SCHEMES[name].spec(), weights(8)
    scale, zero_point = observed(spec, x)
    parts = [observed(spec, part) for part in (x[:3], x[3:])]
    assert torch.cat([part[0] for part in parts]).equal(scale)
    assert torch.cat([part[1] for part in parts]).equal(zero_point)
    columns = observed(replace(spec, ch_axis=0, observer_cls=None), x.T)
    assert columns[0].equal(scale.T) and columns[1].equal(zero_point.T)


def test_a_block_without_super_block_has_nearly_its_best_scale_and_minimum():
    """Beside all pairs of a fine grid. One block alone has integers at their largest."""
    spec = BLOCK_SCHEMES["q4_k"].spec()
    x = weights(1, 32)
    grid = torch.linspace(0.6, 1.2, 121)
    low, high = x.min(), x.max()
    steps = ((high - low) / 15 * grid)[:, None, None]
    least = (low * grid)[None, :, None]
    codes = ((x - least) / steps).round().clamp(0, 15)
    best = float((codes * steps + least - x).square().sum(-1).min())
    start = qparams_from_range(low.view(1, 1), high.view(1, 1), replace(spec.scheme, scale=FLOAT32))
    found = fit(x.view(1, 1, 32), start, spec.scheme)
    assert error(spec, x, found) < 1.05 * best


def test_values_that_are_not_finite_are_refused():
    x = weights(1)
    x[0, 3] = torch.inf
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        observed(BLOCK_SCHEMES["q4_k"].spec(), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e3])
def test_sizes_of_values(name, scale):
    """float16 numbers underflow; the error is never above that of ranges."""
    spec, x = BLOCK_SCHEMES[name].spec(), weights(2, scale=scale)
    ranges = error(spec, x, observed(spec, x, "PerGroupMinMaxObserver"))
    assert error(spec, x, observed(spec, x)) <= 1.001 * ranges
