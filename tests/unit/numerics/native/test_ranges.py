"""Ranges by kernels are those by operations of torch and of numpy."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.extra.numpy import arrays

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.native import ranges
from quark.torch.numerics.native.ranges import find_extremes
from quark.torch.numerics.scales import block_range
from quark.torch.numerics.scheme import Scheme

TYPES = [torch.bfloat16, torch.float16, torch.float32]
INT8 = Dtype.int8.value
SCHEMES = {
    "tensor": Scheme(INT8),
    "channel": Scheme(INT8, QSchemeType.per_channel),
    "last channel": Scheme(INT8, QSchemeType.per_channel, axis=-1),
    "group": Scheme(INT8, QSchemeType.per_group, axis=-1, group=32),
    "ragged group": Scheme(INT8, QSchemeType.per_group, axis=-1, group=40),
    "first axis": Scheme(INT8, QSchemeType.per_group, axis=0, group=8),
    "block": Scheme(INT8, QSchemeType.per_block, block=(16, 32)),
    "token": Scheme(INT8, per_token=True),
}
SERVED = {"tensor", "channel", "group", "ragged group", "block", "token"}


def both(x, scheme, monkeypatch):
    """The range by kernels, and by operations of torch."""
    by_kernel = block_range(x, scheme)
    monkeypatch.setenv("QUARK_KERNELS", "torch")
    by_torch = block_range(x, scheme)
    monkeypatch.delenv("QUARK_KERNELS")
    return by_kernel, by_torch


def assert_same(by_kernel, by_torch):
    for mine, others in zip(by_kernel, by_torch, strict=True):
        assert mine.dtype == others.dtype == torch.float32
        torch.testing.assert_close(mine, others, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_granularity(name, dtype, any_size, monkeypatch):
    calls = []
    run_rows = ranges.run_rows
    monkeypatch.setattr(ranges, "run_rows", lambda *a: (calls.append(a), run_rows(*a)))
    x = torch.randn(48, 96).mul(3).to(dtype)
    assert_same(*both(x, SCHEMES[name], monkeypatch))
    assert len(calls) == (name in SERVED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value(dtype, any_size):
    """Each of the 65,536 values beside 1, -1 and nothing."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = bits.view(dtype)
    for beside in (None, 1.0, -1.0):
        others = values if beside is None else torch.full_like(values, beside)
        rows = torch.stack([values, *[others] * 7], 1)
        lo, hi = find_extremes(rows, (1,))
        expected = rows.float().numpy()
        np.testing.assert_array_equal(lo.float().numpy(), expected.min(1))  # NaN propagates
        np.testing.assert_array_equal(hi.float().numpy(), expected.max(1))


@pytest.mark.parametrize("dtype", TYPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 9),
    length=st.sampled_from([8, 9, 15, 16, 17, 24, 31, 32, 33, 64, 100, 300]),
)
def test_any_bits(dtype, data, rows, length, any_size):
    bits = data.draw(arrays(f"int{8 * dtype.itemsize}", (rows, length)))
    x = torch.from_numpy(bits).view(dtype)
    lo, hi = find_extremes(x, (1,))
    np.testing.assert_array_equal(lo.float().numpy(), x.float().numpy().min(1))
    np.testing.assert_array_equal(hi.float().numpy(), x.float().numpy().max(1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("length", [*range(8, 70), 256, 1001])
def test_every_place_counts(length, dtype, any_size):
    """The extreme of a row is found wherever it lies."""
    rows = torch.zeros(length, length, dtype=dtype).fill_diagonal_(-2.0)
    lo, hi = find_extremes(torch.cat([rows, -rows]), (1,))
    expected = torch.tensor([-2.0, 0.0]).repeat_interleave(length).to(dtype)
    assert torch.equal(lo, expected)
    assert torch.equal(hi, -expected.flip(0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40])
def test_special_values(special, dtype, any_size, monkeypatch):
    x = torch.zeros(4, 64)
    x[1, 63] = special
    x[2] = special
    x[3, ::2] = special
    for name in SERVED:
        assert_same(*both(x.to(dtype), SCHEMES[name], monkeypatch))


def test_other_types_and_strides_are_left_to_torch(any_size):
    x = torch.randn(8, 64)
    assert find_extremes(x.double(), (1,)) is None
    assert find_extremes(x.T, (1,)) is None
    assert find_extremes(x, (0,)) is None
    assert find_extremes(x.view(8, 16, 4), (2,)) is None
    assert find_extremes(x, (1,)) is not None


def test_gradients_reach_the_extremes(any_size):
    x = torch.randn(4, 64, requires_grad=True)
    _, hi = block_range(x, SCHEMES["channel"])
    hi.sum().backward()
    assert torch.equal(x.grad, (x == x.amax(1, keepdim=True)).float())
