"""One numeric path: fake quantization is what packed codes give back, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.numerics.dtypes import type_name
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import ORDERS, pack, unpack
from quark.torch.numerics.qdq import (
    dequantize,
    dynamic_qparams,
    fake_quantize,
    fake_quantize_,
    quantize,
    recover_codes,
)
from quark.torch.numerics.scale_formats import ScaleFormat
from quark.torch.numerics.scheme import Scheme

INTEGERS = ["int8", "uint8", "int4", "uint4", "int3", "int2"]
FP8 = ["fp8_e4m3", "fp8_e5m2"]
SCALED = [*INTEGERS, *FP8]
CASTS = ["bfloat16", "float16"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
GRANULARITIES = {
    "tensor": {},
    "channel": {"qscheme": QSchemeType.per_channel},
    "group": {"qscheme": QSchemeType.per_group},
    "token": {"qscheme": QSchemeType.per_channel, "per_token": True},
}
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, -x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
}
quick = settings(deadline=None, derandomize=True, max_examples=40)


def bits(x):
    """A tensor as integers, which tell -0 from 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@st.composite
def problems(draw, name, granularity):
    """A scheme of the format and granularity, and a tensor of any shape, type and layout."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    symmetric = draw(st.booleans()) or name in FP8
    scheme = Scheme(
        Dtype[name].value,
        **GRANULARITIES[granularity],
        axis=axis,
        group=draw(st.sampled_from([-1, 1, 2, 3, 4, 16])),
        symmetric=symmetric,
        rounding=draw(st.sampled_from(RoundType)),
        scale=ScaleFormat(type_name(draw(st.sampled_from(TYPES)))),
        float_zero_point=draw(st.booleans()) and not symmetric,
    )
    magnitude = draw(st.sampled_from([1e-6, 0.02, 1.0, 300.0]))
    offset = draw(st.sampled_from([0.0, 0.0, 1.5, -1.5]))
    seed = draw(st.integers(0, 1 << 16))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x = LAYOUTS[draw(st.sampled_from([*LAYOUTS]))]((x + offset) * magnitude)
    return scheme, x.to(draw(st.sampled_from(TYPES)))


def through_storage(x, scale, zero_point, scheme, method="reorder"):
    """Quantize, pack, unpack and dequantize."""
    fmt = scheme.fmt
    words = pack(quantize(x, scale, zero_point, scheme), fmt, method)
    assert words.dtype == fmt.storage_dtype
    codes = unpack(words, fmt, x.shape[-1], method)
    return dequantize(codes, scale, zero_point, scheme, x.dtype)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SCALED)
@quick
@given(data=st.data())
@pytest.mark.sampled(6)
def test_fake_is_what_storage_gives_back(name, granularity, data):
    scheme, x = data.draw(problems(name, granularity))
    qparams = dynamic_qparams(x, scheme)
    faked = fake_quantize(x, *qparams, scheme)
    method = data.draw(st.sampled_from([*ORDERS]))
    assert same(through_storage(x, *qparams, scheme, method), faked)
    assert faked.shape == x.shape and faked.dtype == x.dtype
    assert faked.isfinite().all()
    kept = x.clone(memory_format=torch.preserve_format)
    assert fake_quantize_(kept, *qparams, scheme) is kept
    assert same(kept, faked)


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASTS)
def test_fake_casts_are_what_storage_gives_back(name, layout, kind):
    scheme = Scheme(Dtype[name].value)
    x = LAYOUTS[layout](torch.randn(5, 7) * 1000).to(kind)
    faked = fake_quantize(x, None, None, scheme)
    assert same(through_storage(x, None, None, scheme), faked)
    assert same(faked, x.to(scheme.fmt.code_dtype).to(kind))
    kept = x.clone()
    assert fake_quantize_(kept, None, None, scheme) is kept
    assert same(kept, faked)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SCALED)
@quick
@given(data=st.data())
@pytest.mark.sampled(6)
def test_quantized_values_keep_their_codes(name, granularity, data):
    scheme, x = data.draw(problems(name, granularity))
    x = x.float()
    qparams = dynamic_qparams(x, scheme)
    codes = quantize(x, *qparams, scheme)
    values = dequantize(codes, *qparams, scheme)
    assert same(recover_codes(values, *qparams, scheme), codes)
    if scheme.rounding is not RoundType.floor:
        assert same(fake_quantize(values, *qparams, scheme), values)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCALED)
def test_quantized_values_in_half_precision_stay(name, kind, symmetric):
    scheme = Scheme(Dtype[name].value, QSchemeType.per_group, -1, 16, symmetric=symmetric)
    x = torch.randn(64, 64).to(kind)
    qparams = dynamic_qparams(x, scheme)
    values = fake_quantize(x, *qparams, scheme)
    assert same(fake_quantize(values, *qparams, scheme), values)
