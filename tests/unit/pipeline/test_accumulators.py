"""What is kept of inputs: the same however the data is cut, and against the data itself."""

import pytest
import torch

from quark.torch.pipeline.accumulators import (
    ChannelRange,
    Gram,
    InputSample,
    TokenSample,
)

X = torch.randn(50, 8, generator=torch.Generator().manual_seed(5)) * torch.logspace(-1, 2, 8)
CUTS = {"whole": [50], "one by one": [1] * 50, "uneven": [7, 0, 30, 13], "end": [0, 49, 1]}


def fed(kept, x=X, cut="whole"):
    for part in x.split(CUTS[cut]):
        kept(part)
    return kept


@pytest.mark.parametrize("cut", CUTS)
def test_ranges(cut):
    kept = fed(ChannelRange(), cut=cut)
    assert torch.equal(kept.lo, X.amin(0)) and torch.equal(kept.hi, X.amax(0))
    assert torch.equal(kept.amax, X.abs().amax(0))


@pytest.mark.parametrize("cut", CUTS)
def test_sums_of_products(cut):
    kept = fed(Gram(), cut=cut)
    assert kept.tokens == 50
    exact = X.double()
    torch.testing.assert_close(kept.total, (exact.T @ exact).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kept.magnitude, exact.abs().sum(0).float())


@pytest.mark.parametrize("groups", [(), (2,)], ids=["one sum", "sums of groups"])
@pytest.mark.parametrize("tokens", [20, 300])
def test_wide_sums_are_symmetric(tokens, groups):
    """Of a wide sum only the parts on the diagonal and above are products."""
    x = torch.randn(*groups, tokens, 600, generator=torch.Generator().manual_seed(4))
    kept = Gram()
    kept(x)
    exact = x.double()
    torch.testing.assert_close(kept.total, (exact.mT @ exact).float(), rtol=1e-4, atol=1e-3)
    assert tokens == 20 or torch.equal(kept.total, kept.total.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_single_precision(dtype):
    x = X.to(dtype)
    kept, expected = Gram(), fed(Gram(), x.float())
    fed(kept, x)
    assert kept.total.dtype is kept.magnitude.dtype is torch.float32
    assert torch.equal(kept.total, expected.total)


@pytest.mark.parametrize("cut", CUTS)
def test_sums_of_double_precision_are_exact(cut):
    """Products of integers of 24 bits, whose sums float64 holds and float32 does not."""
    x = torch.randint(-(2**23), 2**23, (50, 8), generator=torch.Generator().manual_seed(2))
    kept = fed(Gram(), x.double(), cut)
    assert torch.equal(kept.total, (x.T @ x).float())
    assert torch.equal(kept.magnitude, x.abs().sum(0).float())
    assert torch.equal(kept.to("cpu", copy=True).total, kept.total)


def test_sums_of_parts_add_up():
    x = (100 * X / X.abs().amax(0)).round()  # sums are exact in any order
    merged, whole = Gram(), fed(Gram(), x)
    for rows in x.split([20, 0, 30]):
        part = Gram()
        part(rows)
        merged.merge(part)
        part(rows)  # which is of no concern to what was merged
    assert merged.tokens == 50
    assert torch.equal(merged.total, whole.total)
    assert torch.equal(merged.magnitude, whole.magnitude)


@pytest.mark.parametrize(
    ("make", "what"), [(ChannelRange, "lo"), (Gram, "total"), (lambda: TokenSample(4), "tokens")]
)
def test_no_token_is_no_data(make, what):
    kept = make()
    kept(X[:0])
    assert getattr(kept, what) is None


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [1, 7, 49, 50, 60])
def test_the_same_tokens_are_drawn_however_data_is_cut(size, cut):
    whole, parts = TokenSample(size), TokenSample(size)
    fed(whole)
    fed(parts, cut=cut)
    assert len(whole.tokens) == min(size, 50)
    assert torch.equal(parts.tokens, whole.tokens)


@pytest.mark.parametrize("length", [64, 100, 512])
@pytest.mark.parametrize("tokens", [1000, 4096, 32768])
def test_tokens_are_drawn_from_everywhere(tokens, length):
    """Among all tokens no gap is wide, and all parts of sequences of a length come alike."""
    draw = TokenSample(256)
    draw(torch.arange(tokens).unsqueeze(1))
    index = draw.tokens.flatten()
    assert len(index.unique()) == 256
    gaps = torch.cat([index, torch.tensor([tokens])]).diff()
    assert gaps.max() <= 3 * tokens / 256
    places = torch.histc((index % length).double(), 4, 0, length)
    assert (places / 256 - 0.25).abs().max() < 0.05


def test_a_sample_has_tokens_and_the_range_of_all():
    kept, drawn = InputSample(10), TokenSample(10)
    assert kept.is_empty
    fed(kept)
    fed(drawn)
    assert not kept.is_empty
    assert torch.equal(kept.tokens, drawn.tokens)
    assert torch.equal(kept.range.amax, X.abs().amax(0))


def test_a_sample_owns_its_tokens():
    x = X.clone()
    kept, expected = fed(InputSample(10), x), fed(InputSample(10))
    x.zero_()
    assert torch.equal(kept.tokens, expected.tokens)


@pytest.mark.parametrize("make", [Gram, lambda: InputSample(10)], ids=["gram", "sample"])
def test_rescaled_inputs_are_followed(make):
    by = torch.logspace(-2, 2, 8)
    kept, expected = fed(make()), fed(make(), X / by)
    kept.rescale_(by)
    names = ["total", "magnitude"] if isinstance(kept, Gram) else ["tokens"]
    for name in names:
        torch.testing.assert_close(getattr(kept, name), getattr(expected, name))
    if isinstance(kept, InputSample):
        torch.testing.assert_close(kept.range.lo, expected.range.lo)
        torch.testing.assert_close(kept.range.hi, expected.range.hi)
