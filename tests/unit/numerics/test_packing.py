"""Codes to words and back: every code, every shape, and the words that other software reads."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.packing import ORDERS, pack, packed_size, unpack
from tests.unit.numerics.kinds import PACKED

each_dtype = pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
each_method = pytest.mark.parametrize("method", ORDERS)
quick = settings(deadline=None, derandomize=True, max_examples=150)


def all_codes(fmt):
    """Every code of a format, as a vector; of 32 bits, those at the ends."""
    if fmt.bits == 32:
        ends = torch.arange(64, dtype=torch.int64)
        return torch.cat([fmt.qmin + ends, ends - 32, fmt.qmax - ends]).to(fmt.code_dtype)
    if fmt.is_encoded:
        return torch.arange(1 << fmt.bits).to(fmt.code_dtype)
    if fmt.native is not None:
        if fmt.bits == 8:
            return torch.arange(256, dtype=torch.uint8).view(fmt.code_dtype)
        return torch.arange(-32768, 32768).to(torch.int16).view(fmt.code_dtype)
    return torch.arange(fmt.qmin, fmt.qmax + 1).to(fmt.code_dtype)


def bits(x):
    """A tensor as integers, in which NaN equals itself."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def by_hand(codes, fmt, method):
    """Pack a list of codes bit by bit, from its definition."""
    mask, per_word = (1 << fmt.bits) - 1, fmt.word_codes
    size = 8 * fmt.storage_dtype.itemsize
    out = []
    for start in range(0, len(codes), per_word):
        word = 0
        for i, code in enumerate(codes[start : start + per_word]):
            place = i
            if fmt.first_high:
                place = per_word - 1 - i
            elif size == 32 and method == "reorder":
                place = i // 2 + 4 * (i % 2)  # even codes in the lower half, odd in the upper
            word |= (code & mask) << (fmt.bits * place)
        for shift in range(0, per_word * fmt.bits, size):
            part = (word >> shift) & ((1 << size) - 1)
            signed = fmt.storage_dtype == torch.int32 and part >= 1 << 31
            out.append(part - (1 << 32) if signed else part)
    return out


@each_dtype
@each_method
def test_every_code_comes_back(dtype, method):
    fmt = dtype.value
    codes = all_codes(fmt)
    codes = torch.stack([codes, codes], -1).flatten()[:-1]
    back = unpack(pack(codes, fmt, method), fmt, len(codes), method)
    assert back.dtype == fmt.code_dtype
    assert torch.equal(bits(back), bits(codes))


@each_method
@pytest.mark.parametrize("name", PACKED)
@quick
@given(data=st.data())
@pytest.mark.sampled(6)
def test_any_shape(name, method, data):
    """Words are those of the definition, the last one filled with zeros, in any layout."""
    fmt = Dtype[name].value
    shape = data.draw(st.lists(st.integers(1, 5), max_size=2))
    shape.append(data.draw(st.integers(0, 19)))
    every = all_codes(fmt)
    codes = every[torch.randint(len(every), shape)]
    packed = pack(codes, fmt, method)
    rows = codes.reshape(-1, shape[-1]).tolist() if codes.numel() else []
    assert packed.dtype == fmt.storage_dtype
    assert packed.shape == (*shape[:-1], packed_size(shape[-1], fmt))
    assert packed.flatten().tolist() == [w for row in rows for w in by_hand(row, fmt, method)]
    assert torch.equal(unpack(packed, fmt, shape[-1], method), codes)


@each_dtype
@each_method
@pytest.mark.parametrize("count", [9, 16, 17, 33])
def test_layouts_that_are_not_contiguous(dtype, method, count):
    fmt = dtype.value
    codes = all_codes(fmt)
    codes = bits(codes)[torch.randint(len(codes), (count, 12))].view(codes.dtype)
    turned = pack(codes.t(), fmt, method)
    strided = pack(codes.t()[::2], fmt, method)
    assert torch.equal(bits(turned), bits(pack(codes.t().contiguous(), fmt, method)))
    assert torch.equal(bits(unpack(turned, fmt, count, method)), bits(codes.t()))
    assert torch.equal(bits(unpack(strided, fmt, count, method)), bits(codes.t()[::2]))
    words = turned.t().contiguous().t()
    assert not words.is_contiguous()
    assert torch.equal(bits(unpack(words, fmt, count, method)), bits(codes.t()))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
@each_method
def test_along_any_axis(method, dtype, axis):
    fmt = dtype.value
    codes = all_codes(fmt)
    codes = bits(codes)[torch.randint(len(codes), (9, 11, 13))].view(codes.dtype)
    count = codes.shape[axis]
    words = pack(codes, fmt, method, axis)
    last = pack(codes.movedim(axis, -1), fmt, method)
    assert torch.equal(bits(words), bits(last.movedim(-1, axis)))
    assert words.is_contiguous()
    assert torch.equal(bits(unpack(words, fmt, count, method, axis)), bits(codes))


@each_method
@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("name", PACKED)
def test_along_another_axis(name, axis, method):
    """The same words as along the last axis of the turned codes."""
    fmt = Dtype[name].value
    every = all_codes(fmt)
    codes = every[torch.randint(len(every), (9, 17, 5))]
    words = pack(codes, fmt, method, axis)
    assert torch.equal(words, pack(codes.transpose(axis, -1), fmt, method).transpose(axis, -1))
    assert torch.equal(unpack(words, fmt, codes.shape[axis], method, axis), codes)


@pytest.mark.parametrize(
    ("name", "codes", "method", "words"),
    [
        ("uint4", [0, 1, 2, 3, 4, 5, 6, 7], "order", [0x76543210]),
        ("uint4", [0, 1, 2, 3, 4, 5, 6, 7], "reorder", [0x75316420]),
        ("int4", [-8, -7, -6, -5, -4, -3, -2, -1], "reorder", [0xFDB9ECA8 - (1 << 32)]),
        ("int4", [-8, -7, -6, -5, -4, -3, -2, -1], "order", [0xFEDCBA98 - (1 << 32)]),
        ("int3", [0, 1, 2, 3, -4, -3, -2, -1], "reorder", [0x88, 0xC6, 0xFA]),
        ("int3", [0, 1, 2, 3, -4, -3, -2, -1], "order", [0x88, 0xC6, 0xFA]),
        ("int2", [0, 1, -2, -1], "reorder", [0x1B]),
        ("int2", [0, 1, -2, -1], "order", [0x1B]),
    ],
)
def test_words_of_checkpoints(name, codes, method, words):
    fmt = Dtype[name].value
    packed = pack(torch.tensor(codes, dtype=fmt.code_dtype), fmt, method)
    assert packed.tolist() == words
    assert unpack(packed, fmt, len(codes), method).tolist() == codes


def test_reorder_is_the_default():
    fmt = Dtype.uint4.value
    codes = torch.arange(8, dtype=torch.uint8)
    assert pack(codes, fmt).tolist() == [0x75316420]
    assert unpack(pack(codes, fmt), fmt, 8).tolist() == codes.tolist()


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        ("int8", 9, 9),
        ("fp8_e4m3", 9, 9),
        ("int4", 0, 0),
        ("int4", 1, 1),
        ("int4", 8, 1),
        ("int4", 9, 2),
        ("int3", 8, 3),
        ("int3", 9, 6),
        ("int2", 4, 1),
        ("int2", 5, 2),
    ],
)
def test_packed_size(name, count, size):
    assert packed_size(count, Dtype[name].value) == size


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "bfloat16"])
def test_whole_codes_are_not_copied(name):
    fmt = Dtype[name].value
    codes = torch.zeros(4, 8).to(fmt.code_dtype)
    assert pack(codes, fmt).data_ptr() == codes.data_ptr()


def test_two_bits_in_words_of_their_own():
    """How files of versions before 1.0 hold 2-bit codes."""
    fmt = replace(Dtype.int2.value, word_codes=1, word_dtype="int32")
    words = torch.tensor([[-2, -1, 0, 1]], dtype=torch.int32)
    assert unpack(words, fmt, 4).tolist() == [[-2, -1, 0, 1]]
    assert fmt.storage_dtype == torch.int32 and packed_size(4, fmt) == 4


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("way", [lambda x, fmt, m: unpack(x, fmt, 1, m), pack], ids=["un", "pack"])
def test_unknown_method(name, way):
    said = r"pack_method='sorted' is unknown: give one of \['order', 'reorder'\]"
    with pytest.raises(ValueError, match=said):
        way(torch.zeros(1, dtype=torch.int32), Dtype[name].value, "sorted")


@each_method
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_codes_at_odd_places_of_memory(start, method):
    fmt = Dtype.fp4.value
    memory = torch.arange(64, dtype=torch.uint8) % 16
    codes = memory[start : start + 24].view(3, 8)
    expected = [by_hand(row, fmt, method) for row in codes.tolist()]
    assert pack(codes, fmt, method).tolist() == expected
    across = pack(codes.T, fmt, method, axis=0)
    assert across.T.tolist() == expected
