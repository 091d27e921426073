"""Words by kernels are those by operations of torch, and give the codes back."""

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.native.words import find_codes, find_words
from quark.torch.numerics.packing import ORDERS, pack, packed_size, unpack
from tests.unit.numerics.kinds import PACKED


def sample(fmt, *shape):
    """Every code, in any order."""
    codes = torch.randint(0, 1 << fmt.bits, shape)
    if fmt.code_dtype == torch.int8:
        codes -= (codes >> (fmt.bits - 1)) << fmt.bits
    return codes.to(fmt.code_dtype)


@pytest.fixture
def by_torch(monkeypatch):
    """A function that packs or unpacks without kernels."""

    def call(function, *args):
        with monkeypatch.context() as changed:
            changed.setenv("QUARK_KERNELS", "torch")
            return function(*args)

    return call


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.sampled(2, covers=True)
def test_every_format(name, order, threads, any_size, by_torch, monkeypatch):
    torch.set_num_threads(threads)
    monkeypatch.setattr("quark.torch.numerics.native.compilation._PIECE", 16)
    fmt = Dtype[name].value
    for shape in [(16, 40), (8, 8), (64,), (8, 3, 16), (24, 1)]:
        codes = sample(fmt, *shape)
        for axis in {0, len(shape) - 1}:
            if shape[axis] % fmt.word_codes:
                continue
            words = pack(codes, fmt, order, axis)
            expected = by_torch(pack, codes, fmt, order, axis)
            assert (words.shape, words.dtype) == (expected.shape, expected.dtype)
            assert torch.equal(words, expected)
            for restored in (
                unpack(words, fmt, shape[axis], order, axis),
                by_torch(unpack, words, fmt, shape[axis], order, axis),
            ):
                assert restored.dtype == codes.dtype
                assert torch.equal(restored, codes)


@pytest.mark.parametrize("name", PACKED)
def test_kernels_serve_every_packed_format(name, any_size):
    fmt = Dtype[name].value
    codes = sample(fmt, 16, 40)
    places = [fmt.bits * i for i in range(fmt.word_codes)]
    for axis in (0, 1):
        words = find_words(codes, fmt, places, axis)
        assert words.shape[axis] == packed_size(codes.shape[axis], fmt)
        assert torch.equal(find_codes(words, fmt, codes.shape[axis], places, axis), codes)


@pytest.mark.parametrize(
    ("codes", "axis"),
    [
        (torch.zeros(16, 12, dtype=torch.int8), 1),
        (torch.zeros(12, 16, dtype=torch.int8), 0),
        (torch.zeros(16, 8, dtype=torch.int8).T, 0),
        (torch.zeros(16, 8, 8, dtype=torch.int8), 1),
        (torch.zeros(16, 8, dtype=torch.int32), 0),
        (torch.zeros(132, dtype=torch.int8)[4:].view(16, 8), 0),
    ],
    ids=["ragged", "ragged rows", "strided", "middle", "wide", "not aligned"],
)
def test_what_is_left_to_torch(codes, axis, any_size):
    assert find_words(codes, Dtype.int4.value, range(0, 32, 4), axis) is None


@pytest.mark.parametrize(
    ("words", "count", "axis"),
    [
        (torch.zeros(16, 2, dtype=torch.int32), 15, 1),
        (torch.zeros(2, 16, dtype=torch.int32).T, 16, 1),
        (torch.zeros(4, 2, 4, dtype=torch.int32), 16, 1),
        (torch.zeros(16, 2, dtype=torch.int64), 16, 1),
        (torch.zeros(33, dtype=torch.int32)[1:].view(16, 2), 16, 1),
    ],
    ids=["ragged", "strided", "middle", "wide", "not aligned"],
)
def test_words_that_are_left_to_torch(words, count, axis, any_size):
    fmt = Dtype.int4.value
    assert find_codes(words, fmt, count, range(0, 32, 4), axis) is None
    assert not unpack(words, fmt, count, "order", axis).any()
