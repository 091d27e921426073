"""What goes through the cache piece by piece comes out as if it had gone at once."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics import packing, qdq, scales
from quark.torch.numerics.codec import decode
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.pieces import join_rows, row_pieces
from quark.torch.numerics.qdq import dynamic_qparams
from quark.torch.numerics.scale_formats import E4M3, E8M0, FLOAT32
from quark.torch.numerics.scales import block_range, qparams_from_range
from quark.torch.numerics.scheme import Scheme

PACKED = [d.name for d in Dtype if d.value.word_codes > 1]
GROUP, CHANNEL, TENSOR = QSchemeType.per_group, QSchemeType.per_channel, QSchemeType.per_tensor
SCHEMES = {
    "int8 per tensor": Scheme(Dtype.int8.value, TENSOR),
    "uint4 per channel": Scheme(Dtype.uint4.value, CHANNEL, axis=0, symmetric=False),
    "int8 per column": Scheme(Dtype.int8.value, CHANNEL, axis=1),
    "uint4 per group": Scheme(Dtype.uint4.value, GROUP, axis=-1, group=16, symmetric=False),
    "int4 along rows": Scheme(Dtype.int4.value, GROUP, axis=0, group=4),
    "mxfp4": Scheme(Dtype.fp4.value, GROUP, axis=-1, group=32, scale=E8M0),
    "nvfp4": Scheme(Dtype.fp4.value, GROUP, axis=-1, group=16, scale=E4M3),
    "mx6": Scheme(Dtype.mx6.value, GROUP, axis=-1, group=16),
    "mx6 along rows": Scheme(Dtype.mx6.value, GROUP, axis=0, group=16),
    "ragged": Scheme(Dtype.fp4.value, GROUP, axis=-1, group=40, scale=FLOAT32),
    "2-D blocks": Scheme(Dtype.int8.value, QSchemeType.per_block, block=(3, 32)),
}


@pytest.mark.parametrize("elements", [1, 100, 128, 129, 10**6])
def test_pieces_are_rows_in_order(elements):
    x = torch.arange(11 * 64).reshape(11, 64)
    pieces = row_pieces(x, elements)
    assert all(len(piece) == 1 or piece.numel() <= elements for piece in pieces)
    assert torch.equal(join_rows(pieces), x)


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_found_in_pieces_are_those_of_the_whole(name, monkeypatch):
    scheme = SCHEMES[name]
    monkeypatch.setattr(qdq, "RANGE_CHUNK", 2 * 96)
    x = torch.randn(12, 96) * torch.logspace(-3, 3, 12).unsqueeze(1)
    expected = qparams_from_range(*block_range(x, scheme), scheme)
    for found, whole in zip(dynamic_qparams(x, scheme), expected, strict=True):
        assert (found is None) == (whole is None)
        if found is not None:
            assert found.shape == whole.shape
            assert torch.equal(found, whole)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", PACKED)
def test_codes_packed_in_pieces_are_those_packed_at_once(name, axis, monkeypatch):
    fmt = Dtype[name].value
    low = 0 if fmt.is_float else fmt.qmin
    codes = torch.randint(low, low + (1 << fmt.bits) - 1, (9, 13, 21)).to(fmt.code_dtype)
    whole = pack(codes, fmt, axis=axis)
    monkeypatch.setattr(packing, "PIECE", 3 * 13 * 21)
    assert torch.equal(pack(codes, fmt, axis=axis), whole)
    assert torch.equal(unpack(whole, fmt, codes.shape[axis], axis=axis), codes)


@pytest.mark.parametrize("name", ["fp4", "fp6_e3m2", "fp8_e5m3"])
def test_codes_are_decoded_in_any_order_of_memory(name):
    fmt = Dtype[name].value
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8).clamp(max=254).reshape(-1, 4)
    assert torch.equal(decode(codes.t(), fmt), decode(codes, fmt).t())
    assert torch.equal(decode(codes[:, 1], fmt), decode(codes, fmt)[:, 1])


@pytest.mark.parametrize("name", ["fp4", "fp6_e2m3", "fp8_e4m3"])
def test_codes_of_bfloat16_in_pieces_are_those_at_once(name, monkeypatch):
    scheme = Scheme(Dtype[name].value, GROUP, axis=-1, group=32, scale=E8M0)
    x = (torch.randn(7, 96) * torch.logspace(-3, 3, 7).unsqueeze(1)).bfloat16()
    scale, _ = dynamic_qparams(x, scheme)
    whole = qdq.quantize(x, scale, None, scheme)
    monkeypatch.setattr(qdq, "CHUNK", 2 * 3 * 96)  # the last piece is smaller
    assert torch.equal(qdq.quantize(x, scale, None, scheme), whole)
    assert torch.equal(qdq.quantize(x.float(), scale, None, scheme), whole)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 80)),
    st.one_of(st.integers(1, 80), st.sampled_from([16, 31, 32, 33])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 400),
    st.integers(0, 2**31),
)
def test_ranges_and_codes_of_any_pieces_are_those_of_the_whole(shape, group, kind, piece, seed):
    """Groups may be short, and the last one ragged; the last piece may be smaller."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
    padded = F.pad(x, (0, -shape[1] % group)).unfold(1, group, group)
    scheme = Scheme(Dtype.fp4.value, GROUP, axis=-1, group=group, scale=FLOAT32)
    scale, _ = dynamic_qparams(x, scheme)
    whole = qdq.quantize(x, scale, None, scheme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales, "_PIECE", piece)
        patch.setattr(qdq, "CHUNK", piece)
        lo, hi = block_range(x, scheme)
        assert torch.equal(qdq.quantize(x, scale, None, scheme), whole)
    assert lo.dtype == hi.dtype == torch.float32
    assert lo.tolist() == [[min(values) for values in row] for row in padded.tolist()]
    assert hi.tolist() == [[max(values) for values in row] for row in padded.tolist()]
