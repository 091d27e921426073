"""Tensors with values that are not finite."""

import pytest
import torch

from quark.torch.numerics.finite import find_infinite, is_finite

GOOD = {
    "values": torch.tensor([1.0, -3e38]),
    "none": torch.empty(0),
    "integers": torch.tensor([1, 2]),
    "bytes": torch.tensor([448.0, -1.0]).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_first_tensor_is_named(value, dtype):
    bad = torch.tensor([1.0, value, 2.0], dtype=dtype)
    assert not is_finite(bad)
    assert find_infinite({**GOOD, "second": bad, "third": bad}) == "second"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_value_of_a_large_tensor(value, dtype):
    """Kernels process it, which find ranges of parts."""
    large = torch.zeros(1 << 10, 1 << 9, dtype=dtype)
    assert is_finite(large)
    large[777, 333] = value
    assert not is_finite(large)


def test_finite_tensors():
    assert find_infinite(GOOD) is None
    assert find_infinite({}) is None
    assert all(is_finite(x) for x in GOOD.values())


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e8m0fnu,
        torch.bfloat16,
        torch.uint8,
    ],
)
def test_codes(dtype):
    codes = torch.arange(256).to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)
    finite = codes.float().isfinite()
    assert [is_finite(code) for code in codes.split(1)] == finite.tolist()
    assert is_finite(codes) == bool(finite.all()) and is_finite(codes[finite])
    assert is_finite(codes[:0])


@pytest.mark.parametrize(("dtype", "bad"), [(torch.float8_e4m3fn, 0x7F), (torch.float8_e5m2, 0x7C)])
@pytest.mark.parametrize("place", [0, 700 * 513, -1])
def test_one_code_of_a_large_tensor(dtype, bad, place):
    """A kernel finds the largest code of parts."""
    codes = torch.arange(1024 * 513).remainder(256).to(torch.uint8)
    codes[~codes.view(dtype).float().isfinite()] = 0
    assert is_finite(codes.view(dtype))
    for code in (bad, bad | 0x80):
        codes[place] = code
        assert not is_finite(codes.view(dtype))
