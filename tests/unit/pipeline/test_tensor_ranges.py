"""Ranges of tensors: the same however the data is cut."""

import pytest
import torch

from quark.torch.pipeline.tensor_ranges import TensorRange

X = torch.randn(50, 8, generator=torch.Generator().manual_seed(5)) * torch.logspace(-1, 2, 8)
CUTS = {"whole": [50], "one by one": [1] * 50, "uneven": [7, 0, 30, 13], "end": [0, 49, 1]}


def test_no_token_is_no_data():
    kept = TensorRange()
    kept(X[:0])
    assert kept.is_empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_range_is_the_same_however_data_is_cut(cut, dtype):
    x, kept = X.to(dtype), TensorRange()
    for part in x.split(cut):
        kept(part)
    assert torch.equal(kept.channels.lo, x.amin(0).float())
    assert torch.equal(kept.channels.hi, x.amax(0).float())
    expected = torch.histc(x.double(), 4096, -kept.histogram.limit, kept.histogram.limit)
    assert torch.equal(kept.histogram.counts.double(), expected)


@pytest.mark.parametrize("x", [X, torch.zeros(3, 8), -X.abs()], ids=["any", "zeros", "negative"])
def test_a_range_comes_back_from_its_parts(x):
    kept = TensorRange()
    kept(x)
    found = TensorRange.from_tensors(kept.channels.lo, kept.channels.hi, kept.histogram.counts)
    assert vars(found.histogram).keys() == vars(kept.histogram).keys()
    for name in ("limit", "lo", "hi"):
        assert getattr(found.histogram, name) == getattr(kept.histogram, name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_is_an_error(value):
    x = X.clone()
    x[3, 5] = value
    with pytest.raises(FloatingPointError):
        TensorRange()(x)
