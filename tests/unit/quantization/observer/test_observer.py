"""Observers: what they remember, and that it does not matter how data is cut in batches."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scales import block_range, qparams_from_range
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.observer.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
    PerGroupMinMaxObserver,
    PerTensorMinMaxObserver,
    PlaceholderObserver,
)
from quark.torch.quantization.observer.registry import (
    OBSERVER_METHODS,
    OBSERVERS,
    observer_class,
)

# Granularities in which batches along the first axis share their scales, by observer.
KINDS = {
    "tensor": (PerTensorMinMaxObserver, {}),
    "channel": (PerChannelMinMaxObserver, {"qscheme": QSchemeType.per_channel, "axis": -1}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind="tensor", dtype=Dtype.uint8, **options):
    cls, granularity = KINDS[kind]
    scheme = Scheme(dtype.value, **granularity, symmetric=dtype.value.is_float, **options)
    return cls(SimpleNamespace(scheme=scheme))


def equal(a, b):
    return all(
        (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


@each_kind
@pytest.mark.parametrize("dtype", [Dtype.uint8, Dtype.int4, Dtype.fp8_e4m3], ids=lambda d: d.name)
@settings(deadline=None, derandomize=True, max_examples=50)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 999))
def test_batches_or_one_piece(kind, dtype, sizes, seed):
    """Empty batches included, in any order; against the extremes that torch finds."""
    sizes = [*sizes, 3]
    x = torch.randn(sum(sizes), 7, generator=torch.Generator().manual_seed(seed)) + 0.5
    batched, reversed_ = make(kind, dtype), make(kind, dtype)
    for batch in x.split(sizes):
        batched(batch)
    for batch in reversed(x.split(sizes)):
        reversed_(batch)
    dims = (0, 1) if kind == "tensor" else (0,)
    expected = qparams_from_range(x.amin(dims), x.amax(dims), batched.scheme)
    assert equal(batched.calculate_qparams(), expected)
    assert equal(reversed_.calculate_qparams(), expected)


def test_groups_of_a_weight():
    scheme = Scheme(Dtype.int4.value, QSchemeType.per_group, -1, 4)
    observer = PerGroupMinMaxObserver(SimpleNamespace(scheme=scheme))
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    observer(a)
    observer(b)
    both = torch.stack([a, b]).reshape(2, 3, 2, 4)
    scale, zero_point = observer.calculate_qparams()
    assert torch.equal(scale, both.abs().amax((0, 3)) / 7.5)
    assert torch.equal(zero_point, torch.zeros(3, 2, dtype=torch.int32))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_observed_passes_unchanged(kind, dtype):
    observer = make(kind)
    x = torch.randn(4, 7, dtype=dtype, requires_grad=True)
    before = x.detach().clone()
    assert observer(x) is x
    assert torch.equal(x, before)
    assert observer.lo.dtype == observer.hi.dtype == torch.float32
    assert not observer.lo.requires_grad
    assert observer.hi.max() == before.max().float()


def test_statistics_do_not_follow_the_tensor():
    """A batch may be reused by who made it."""
    observer = make("channel")
    x = torch.ones(1, 7)
    observer(x)
    x.fill_(100.0)
    assert observer.hi.tolist() == [1.0] * 7


def test_ranges_can_be_widened_from_outside():
    observer = make()
    observer(torch.tensor([-1.0, 2.0]))
    observer.widen(torch.tensor(-3.0), torch.tensor(1.0))
    assert (observer.lo.item(), observer.hi.item()) == (-3.0, 2.0)
    scale, zero_point = observer.calculate_qparams()
    assert scale.item() == pytest.approx(5 / 255) and zero_point.item() == 153


@each_kind
def test_before_data(kind):
    observer = make(kind)
    assert observer.is_empty
    with pytest.raises(RuntimeError, match="No data was observed"):
        observer.calculate_qparams()


@each_kind
@pytest.mark.parametrize("shape", [(0,), (0, 7), (4, 0)], ids=str)
def test_an_empty_tensor_changes_nothing(kind, shape):
    observer = make(kind)
    observer(torch.empty(shape))
    assert observer.is_empty
    observer(torch.ones(1, 7))
    before = observer.calculate_qparams()
    observer(torch.empty(shape))
    assert equal(observer.calculate_qparams(), before)


@each_kind
def test_reset(kind):
    observer = make(kind)
    observer(torch.full((2, 7), 1000.0))
    observer.reset()
    assert observer.is_empty
    with pytest.raises(RuntimeError, match="No data was observed"):
        observer.calculate_qparams()
    x = torch.randn(3, 7)
    observer(x)
    assert equal(
        observer.calculate_qparams(),
        qparams_from_range(*block_range(x, observer.scheme), observer.scheme),
    )


@each_kind
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_damaged_value_is_not_forgotten(kind, value):
    observer = make(kind)
    observer(torch.randn(3, 7))
    damaged = torch.randn(3, 7)
    damaged[1, 2] = value
    observer(damaged)
    observer(torch.randn(3, 7))
    assert not observer.is_empty
    with pytest.raises(FloatingPointError, match="NaN or infinite values were observed"):
        observer.calculate_qparams()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [Dtype.uint8, Dtype.int2, Dtype.fp8_e4m3], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "name", [n for n in OBSERVERS if "PerTensor" in n or n == "MovingAverageMinMaxObserver"]
)
@pytest.mark.sampled(2, covers=True)
def test_finite_data_has_finite_scales(name, dtype, kind):
    """The largest value less the smallest is beyond the type of either."""
    fmt, top = dtype.value, torch.finfo(kind).max
    observer = observer_class(name)(SimpleNamespace(scheme=Scheme(fmt, symmetric=fmt.is_float)))
    observer(torch.tensor([-top, 0.5], dtype=kind))
    observer(torch.tensor([top, -1.0, -top], dtype=kind))
    scale, zero_point = observer.calculate_qparams()
    assert scale.isfinite().all() and (scale > 0).all()
    assert zero_point is None or zero_point.isfinite().all()


def test_a_moving_average_between_distant_numbers():
    observer = MovingAverageMinMaxObserver(
        SimpleNamespace(scheme=Scheme(Dtype.int8.value)), averaging_constant=0.25
    )
    top = torch.finfo(torch.float32).max
    observer(torch.tensor([-top]))
    observer(torch.tensor([top]))
    assert observer.lo.item() == observer.hi.item() == pytest.approx(-top / 2)  # (-3 + 1) / 4


def test_statistics_stay_on_their_device():
    scheme = Scheme(Dtype.int8.value)
    observer = MinMaxObserver(SimpleNamespace(scheme=scheme), torch.device("meta"))
    observer(torch.randn(4))
    assert observer.lo.device.type == observer.hi.device.type == "meta"


@pytest.mark.parametrize("dtype", [Dtype.bfloat16, Dtype.float16], ids=lambda d: d.name)
def test_placeholder(dtype):
    observer = PlaceholderObserver(SimpleNamespace(scheme=Scheme(dtype.value)))
    x = torch.tensor([math.nan, 1.0])
    assert observer(x) is x
    assert not observer.is_empty
    assert observer.calculate_qparams() == (None, None)
    observer.reset()
    assert not observer.is_empty


def test_names_in_configurations():
    classes = [
        PlaceholderObserver,
        PerTensorMinMaxObserver,
        PerChannelMinMaxObserver,
        PerGroupMinMaxObserver,
    ]
    assert all(observer_class(cls.__name__) is cls for cls in classes)
    assert OBSERVER_METHODS["min_max"] == "PerTensorMinMaxObserver"
