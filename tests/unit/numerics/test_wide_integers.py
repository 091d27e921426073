"""Integers of 16 and 32 bits, and those of 2 to 7 bits that are packed into bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, packed_size, unpack
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.numerics.scheme import Scheme

RANGES = {
    "int32": (-(2**31), 2**31 - 1, torch.int32),
    "int16": (-(2**15), 2**15 - 1, torch.int16),
    "uint16": (0, 2**16 - 1, torch.uint16),
    "uint7": (0, 127, torch.uint8),
    "uint6": (0, 63, torch.uint8),
    "uint5": (0, 31, torch.uint8),
    "uint3": (0, 7, torch.uint8),
    "uint2": (0, 3, torch.uint8),
}
SMALL = ["uint2", "uint3", "uint5", "uint6", "uint7"]
ONE = torch.tensor(1.0)


def scheme_of(name, symmetric=False, **options):
    return Scheme(Dtype[name].value, symmetric=symmetric, **options)


@pytest.mark.parametrize("name", RANGES)
def test_range(name):
    low, high, kind = RANGES[name]
    fmt = Dtype[name].value
    assert (fmt.qmin, fmt.qmax, fmt.code_dtype) == (low, high, kind)


@pytest.mark.parametrize("name", RANGES)
def test_saturates_at_both_ends(name):
    low, high, kind = RANGES[name]
    x = torch.tensor([-1e30, 1e30, float("inf"), -float("inf"), 0.0])
    codes = quantize(x, ONE, torch.tensor(0), scheme_of(name))
    assert codes.dtype == kind
    assert codes.tolist() == [low, high, high, low, 0]


@pytest.mark.parametrize("name", ["int16", "uint16", *SMALL])
def test_every_code_comes_back(name):
    low, high, kind = RANGES[name]
    scheme = scheme_of(name)
    codes = torch.arange(low, high + 1, dtype=torch.int32).to(kind)
    for scale in (1.0, 0.0371, 3e-5):
        scale, zero = torch.tensor(scale), torch.tensor((low + high) // 2)
        values = dequantize(codes, scale, zero, scheme)
        assert torch.equal(quantize(values, scale, zero, scheme).int(), codes.int())


@pytest.mark.parametrize("scale", [1.0, 2.0**-10, 2.0**-31])
def test_int32_codes_are_float64(scale):
    """Codes of up to 24 bits come back; float32 values of larger ones are the nearest."""
    scale, zero = torch.tensor(scale), torch.tensor(0)
    scheme = scheme_of("int32", symmetric=True)
    exact = torch.tensor([0, 1, -1, 2**24, -(2**24), 2**24 - 1, 2**31 - 128, -(2**31)]).int()
    values = dequantize(exact, scale, zero, scheme)
    assert torch.equal(quantize(values, scale, zero, scheme), exact)
    between = torch.tensor([2**24 + 1, 2**31 - 1], dtype=torch.int32)
    assert dequantize(between, ONE, zero, scheme).tolist() == [2.0**24, 2.0**31]


def test_int32_rounds_in_float64():
    """Scaled values are not rounded to float32 before they become codes."""
    x = torch.rand(1000) * 2 - 1
    scale = x.abs().max() / 2**31
    codes = quantize(x, scale, torch.tensor(0), scheme_of("int32", symmetric=True))
    exact = np.round(x.double().numpy() * (1.0 / scale.double().item()))
    assert codes.tolist() == np.clip(exact, -(2**31), 2**31 - 1).tolist()
    assert (codes % 128 != 0).any()  # float32 would have 24 bits


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("name", RANGES)
@settings(deadline=None, derandomize=True, max_examples=20)
@given(data=st.data())
def test_fake_is_what_storage_gives_back(name, symmetric, data):
    shape = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    granularity = data.draw(st.sampled_from(QSchemeType))
    if granularity is QSchemeType.per_block and len(shape) < 2:
        granularity = QSchemeType.per_tensor
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    options = {"qscheme": granularity, "axis": axis, "group": 4, "block": (3, 4)}
    scheme = scheme_of(name, symmetric, **options)
    factor = data.draw(st.sampled_from([1e-6, 0.02, 1.0, 300.0]))
    x = torch.from_numpy(np.random.default_rng(len(shape)).normal(0.3, factor, shape)).float()
    qparams = dynamic_qparams(x, scheme)
    words = pack(quantize(x, *qparams, scheme), scheme.fmt)
    assert words.shape[-1] == packed_size(shape[-1], scheme.fmt)
    back = dequantize(unpack(words, scheme.fmt, shape[-1]), *qparams, scheme)
    faked = fake_quantize(x, *qparams, scheme)
    assert torch.equal(back.view(torch.int32), faked.view(torch.int32))
    assert torch.equal(fake_quantize(faked, *qparams, scheme), faked)


@pytest.mark.parametrize("name", RANGES)
def test_error_is_half_a_step(name):
    x = torch.randn(64, 64)
    scheme = scheme_of(name, symmetric=RANGES[name][0] < 0)
    scale, zero = dynamic_qparams(x, scheme)
    error = (fake_quantize(x, scale, zero, scheme).double() - x.double()).abs()
    # The zero point is rounded, and float32 values have 24 bits.
    assert (error <= scale.double() + x.abs().double() * 2.0**-23).all()
    assert error.max() <= x.abs().max() * 4 / 2 ** min(scheme.fmt.bits, 22)


@pytest.mark.parametrize("sign", [-1, 1], ids=["negative", "positive"])
@pytest.mark.parametrize("name", RANGES)
def test_values_on_one_side_of_zero_use_all_codes(name, sign):
    low, high, _ = RANGES[name]
    scheme = scheme_of(name)
    x = sign * torch.linspace(0, 1000, 500)
    scale, zero_point = dynamic_qparams(x, scheme)
    assert zero_point.dtype == torch.int32
    assert zero_point.item() == (high if sign < 0 else low)
    assert (fake_quantize(x, scale, zero_point, scheme) - x).abs().max() <= scale


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65])
def test_packed_bits_by_hand(name, count):
    """Codes follow each other from the lowest bit up; two-bit codes lie the other way round."""
    width = Dtype[name].value.bits
    codes = torch.randint(0, 1 << width, (count,), dtype=torch.uint8)
    words = pack(codes, Dtype[name].value)
    per_word = Dtype[name].value.word_codes
    expected = []
    for start in range(0, count, per_word):
        group = codes[start : start + per_word].tolist()
        group += [0] * (per_word - len(group))
        if name == "uint2":
            group.reverse()
        word = sum(code << (width * i) for i, code in enumerate(group))
        expected += word.to_bytes(per_word * width // 8, "little")
    assert words.dtype == torch.uint8 and words.tolist() == expected
    assert torch.equal(unpack(words, Dtype[name].value, count), codes)
