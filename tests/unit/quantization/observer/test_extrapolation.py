"""Ranges that are widened by what unseen values may exceed them."""

import pytest
import torch

from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.observer.extrapolation import (
    PerTensorExtrapolatedMinMaxObserver,
    extension,
)

NAME = "PerTensorExtrapolatedMinMaxObserver"


def observed(*tensors, symmetric=False, dtype="uint8"):
    spec = QuantizationSpec(
        dtype, NAME, qscheme="per_tensor", symmetric=symmetric, is_dynamic=False
    )
    observer = spec.make_observer()
    for x in tensors:
        observer(x)
    return observer


@pytest.mark.parametrize(("excess", "share", "reach", "width"), [(1, 0.1, 3, 10), (0.5, 0.1, 1, 4)])
def test_the_extension_has_the_least_expected_error(excess, share, reach, width):
    more = torch.linspace(0, 20, 200_001, dtype=torch.float64)
    cut = 2 * share * excess**2 * torch.exp(-(reach + more) / excess)
    errors = cut + (width + more) ** 2 / (12 * 255**2)
    best = float(more[errors.argmin()])
    assert best > 0 and abs(extension(excess, share, reach, width, 255) - best) < 2e-4


def test_nothing_is_widened_where_cutting_costs_less():
    assert extension(0.5, 1.6e-5, 1.4, 10, 255) == 0
    x = torch.randn(10**6)
    assert observed(x).clipped() == (float(x.min()), float(x.max()))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(200, generator=torch.Generator().manual_seed(0)).clamp(-1, 1),  # saturated
        torch.zeros(200),
        torch.randn(8),  # too few for a tail
    ],
)
def test_ends_without_a_tail_stay(x):
    assert observed(x).clipped() == (float(x.min()), float(x.max()))


def test_only_the_end_with_a_tail_is_widened():
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)).relu()
    lo, hi = observed(x).clipped()
    assert lo == 0 and hi > 1.3 * x.max()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_batches_have_the_range_of_the_whole_and_scales_scale_it(symmetric, scale):
    x = scale * torch.randn(128, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    options = {"symmetric": symmetric, "dtype": "int8" if symmetric else "uint8"}
    whole = observed(x, **options).calculate_qparams()
    parts = observed(*x.split(10), **options).calculate_qparams()
    assert all(map(torch.equal, whole, parts))
    assert float(whole[0]) > 1.2 * float(x.max() - x.min()) / 255


def test_unseen_values_have_a_smaller_error():
    """Of 128 values, over 50 draws, for normal and for exponential tails."""
    generator = torch.Generator().manual_seed(0)
    for power in (1, 1.5):
        errors = torch.zeros(2, dtype=torch.float64)
        for _ in range(50):
            normal = torch.randn(2, 128, generator=generator)
            x, unseen = normal.sign() * normal.abs() ** power
            for i, name in enumerate([NAME, "PerTensorMinMaxObserver"]):
                spec = QuantizationSpec(
                    "uint8", name, qscheme="per_tensor", symmetric=False, is_dynamic=False
                )
                observer = spec.make_observer()
                observer(x)
                scale, zero = observer.calculate_qparams()
                codes = (unseen / scale).round().add(zero).clamp(0, 255)
                errors[i] += ((codes - zero) * scale - unseen).double().square().mean()
        assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_floats_are_refused(dtype):
    with pytest.raises(ValueError, match="integer dtype"):
        QuantizationSpec(dtype, PerTensorExtrapolatedMinMaxObserver, qscheme="per_tensor")
