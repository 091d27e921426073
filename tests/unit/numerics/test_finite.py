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


def test_finite_tensors():
    assert find_infinite(GOOD) is None
    assert find_infinite({}) is None
    assert all(is_finite(x) for x in GOOD.values())
