"""Fake quantization is what packed codes and stored scales give back, for all block formats."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics import qdq
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.qdq import (
    dequantize,
    dynamic_qparams,
    fake_quantize,
    fake_quantize_,
    quantize,
    recover_codes,
)
from quark.torch.numerics.scale_codec import decode_scale, encode_scale
from quark.torch.numerics.scale_formats import E4M3, E5M3, E8M0, POF2, ScaleFormat
from quark.torch.numerics.scales import block_range, tensor_scale_from_range
from quark.torch.numerics.scheme import Scheme
from tests.unit.numerics.kinds import FLOATS, SHARED

SCALES = {
    "float32": ScaleFormat(),
    "float16": ScaleFormat("float16"),
    "bfloat16": ScaleFormat("bfloat16"),
    "pof2": POF2,
    "e8m0": E8M0,
    "e4m3": E4M3,
    "e5m3": E5M3,
}
CASES = [(name, scale) for name in FLOATS for scale in SCALES]
CASES += [(name, "float32" if Dtype[name].value.block else "e8m0") for name in SHARED]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
quick = settings(deadline=None, derandomize=True, max_examples=30)


def same(a, b):
    """Bit by bit: -0 is not 0."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


@st.composite
def problems(draw, name, scale):
    """A scheme of the format, and a tensor of any shape and type."""
    fmt = Dtype[name].value
    shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    group = draw(st.sampled_from([16, 32] if fmt.sub_block else [1, 3, 8, 16, 32]))
    if fmt.block:
        fmt = replace(fmt, block=group)
    scheme = Scheme(
        fmt,
        QSchemeType.per_group,
        axis=draw(st.integers(-len(shape), len(shape) - 1)),
        group=group,
        rounding=draw(st.sampled_from(RoundType)),
        scale=SCALES[scale],
        scale_mode=draw(st.sampled_from(["even", "floor", "ceil"])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    x = torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-6, 0.02, 1.0, 300.0]))
    x[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return scheme, x.to(draw(st.sampled_from(TYPES)))


@pytest.mark.parametrize(("name", "scale"), CASES)
@quick
@given(data=st.data())
@pytest.mark.sampled(6)
def test_fake_is_what_storage_gives_back(name, scale, data):
    scheme, x = data.draw(problems(name, scale))
    over = None
    if scheme.scale.two_level:
        over = tensor_scale_from_range(*block_range(x, scheme), scheme)
    scales, zero_point = dynamic_qparams(x, scheme, over)
    assert zero_point is None
    faked = fake_quantize(x, scales, None, scheme)
    words = pack(quantize(x, scales, None, scheme), scheme.fmt)
    stored = encode_scale(scales, scheme, over)
    assert words.dtype == scheme.fmt.storage_dtype
    codes = unpack(words, scheme.fmt, x.shape[-1])
    read = decode_scale(stored, scheme, tuple(x.shape), over)
    assert same(dequantize(codes, read, None, scheme, x.dtype), faked)
    assert faked.isfinite().all()
    assert same(fake_quantize_(x.clone(), scales, None, scheme), faked)


@pytest.mark.parametrize(("name", "scale"), CASES)
@quick
@given(data=st.data())
@pytest.mark.sampled(3)
def test_quantized_values_keep_their_codes(name, scale, data):
    scheme, x = data.draw(problems(name, scale))
    scales, _ = dynamic_qparams(x.float(), scheme)
    codes = quantize(x.float(), scales, None, scheme)
    values = dequantize(codes, scales, None, scheme)
    again = recover_codes(values, scales, None, scheme)
    # A value rounded to zero keeps its sign where the format has one.
    assert torch.equal(again.float(), codes.float())
    nearest = replace(scheme, rounding=RoundType.half_even)
    assert same(fake_quantize(values, scales, None, nearest), values)


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_gradients_pass_inside_the_range(name, scale):
    fmt = Dtype[name].value
    scheme = Scheme(fmt, QSchemeType.per_group, axis=-1, group=fmt.block or 32, scale=SCALES[scale])
    x = torch.randn(4, 64)
    scales, _ = dynamic_qparams(x, scheme)
    x = torch.cat([x, x * 100, torch.zeros_like(x)])
    x.requires_grad_(True)
    grids = [1] * (scales.dim() - 1)
    fake_quantize(x, scales.repeat(3, *grids), None, scheme).sum().backward()
    assert x.grad.isfinite().all() and x.grad.unique().tolist() == [0, 1]
    assert x.grad[:4].mean() > 0.9 and (x.grad[8:] == 1).all()
    assert x.grad[4:8].mean() < 0.5


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("name", "scale"), CASES)
def test_pieces_make_no_difference(name, scale, axis, monkeypatch):
    fmt = Dtype[name].value
    group = fmt.block or 16
    scheme = Scheme(fmt, QSchemeType.per_group, axis=axis, group=group, scale=SCALES[scale])
    x = torch.randn(45, 50)
    qparams = dynamic_qparams(x, scheme)
    expected = fake_quantize(x, *qparams, scheme), quantize(x, *qparams, scheme).float()
    monkeypatch.setattr(qdq, "CHUNK", 128)
    assert torch.equal(fake_quantize(x, *qparams, scheme), expected[0])
    assert torch.equal(quantize(x, *qparams, scheme).float(), expected[1])


@pytest.mark.parametrize(("name", "scale"), CASES)
def test_empty_tensors(name, scale):
    fmt = Dtype[name].value
    scheme = Scheme(fmt, QSchemeType.per_group, axis=-1, group=fmt.block or 32, scale=SCALES[scale])
    x = torch.zeros(0, 64)
    assert fake_quantize(x, *dynamic_qparams(x, scheme), scheme).shape == (0, 64)
