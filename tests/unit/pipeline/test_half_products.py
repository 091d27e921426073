"""Sums of products of half types: on devices that have them, and on those that are wrong."""

import logging

import pytest
import torch

from quark.torch.pipeline import half_products
from quark.torch.pipeline.accumulators import Gram

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def device_products():
    """Give CPUs the operators that accelerators have, as a function makes them; count its calls."""
    library = torch.library.Library("aten", "IMPL")

    def install(change=lambda y: y):
        calls = []

        def multiply(a, b, out_dtype):
            calls.append((a.dtype, tuple(a.shape)))
            return change((a.double() @ b.double()).to(out_dtype))

        for name in ("mm.dtype", "bmm.dtype"):
            library.impl(name, multiply, "CPU")
        half_products._is_proved.cache_clear()
        return calls

    yield install
    library._destroy()
    half_products._is_proved.cache_clear()


def inputs(dtype, *groups):
    return torch.randn(*groups, 600, 520, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("groups", [(), (2,)], ids=["one sum", "sums of groups"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_sums_of_devices_that_multiply_halves(device_products, dtype, groups):
    calls = device_products()
    x = inputs(dtype, *groups)
    assert half_products.multiplies_halves(x)
    calls.clear()
    kept = Gram()
    for part in x.tensor_split(2, dim=-2):
        kept(part)
    exact = x.double()
    assert kept.total.dtype is kept.magnitude.dtype is torch.float32
    torch.testing.assert_close(kept.total, (exact.mT @ exact).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kept.magnitude, exact.abs().sum(-2).float())
    assert {(of, shape[-1]) for of, shape in calls} == {(dtype, x.shape[-2] // 2)}


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda y: y.bfloat16().float(), lambda y: y * torch.nan],
    ids=["zeros", "sums in bfloat16", "NaN"],
)
def test_wrong_products_are_not_used(device_products, change, caplog):
    device_products(change)
    x = inputs(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert not half_products.multiplies_halves(x)
    assert "bfloat16 are wrong on cpu" in caplog.text
    kept, expected = Gram(), Gram()
    kept(x)
    expected(x.float())
    assert torch.equal(kept.total, expected.total)


def test_devices_without_such_products():
    half_products._is_proved.cache_clear()
    assert not any(half_products.multiplies_halves(inputs(dtype)) for dtype in HALVES)
    assert not half_products.multiplies_halves(inputs(torch.float32))


def test_versions_of_torch_without_such_products(monkeypatch):
    def product(a, b):
        raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")

    half_products._is_proved.cache_clear()
    monkeypatch.setattr(half_products, "product", product)
    assert not any(half_products.multiplies_halves(inputs(dtype)) for dtype in HALVES)
