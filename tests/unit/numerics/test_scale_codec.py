"""Scales come back from storage as they went in, for every way of storing them."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams
from quark.torch.numerics.scale_codec import (
    decode_scale,
    encode_scale,
    stored_dtype,
    stored_shape,
)
from quark.torch.numerics.scale_formats import E5M3, E8M0, POF2, ScaleFormat, ScaleType
from quark.torch.numerics.scales import block_range, qparams_from_range, tensor_scale_from_range
from quark.torch.numerics.scheme import Scheme

PER_GROUP = QSchemeType.per_group


def grouped(name, group, scale=E8M0, **options):
    fmt = Dtype[name].value
    if fmt.block:
        fmt, scale = replace(fmt, block=group), ScaleFormat()
    return Scheme(fmt, PER_GROUP, axis=-1, group=group, scale=scale, **options)


E4M3 = ScaleFormat("float8_e4m3fn", Dtype.fp8_e4m3.value, two_level=True)
TWO_LEVEL_E5M3 = ScaleFormat("uint8", Dtype.fp8_e5m3.value, two_level=True)
SCHEMES = {
    "mxfp4": grouped("fp4", 32),
    "mxfp6": grouped("fp6_e3m2", 32, scale_mode="ceil"),
    "mxfp8": grouped("fp8_e5m2", 32, scale_mode="floor"),
    "mxint8": grouped("mx", 32),
    "mx6": grouped("mx6", 16),
    "mx6 of 32": grouped("mx6", 32),
    "mx9": grouped("mx9", 16),
    "mx9 of 32": grouped("mx9", 32),
    "bfp16": grouped("bfp16", 8),
    "nvfp4": grouped("fp4", 16, E4M3),
    "amdfp4": grouped("fp4", 16, E5M3),
    "two-level e5m3": grouped("fp4", 16, TWO_LEVEL_E5M3),
    "int4 under e4m3": grouped("int4", 16, E4M3),
    **{f"fp4 {t.name}": grouped("fp4", 16, t.format) for t in ScaleType},
    "int4 float16": grouped("int4", 8, ScaleFormat("float16")),
    "int8 pof2": Scheme(Dtype.int8.value, scale=POF2),
    "fp8 per tensor": Scheme(Dtype.fp8_e4m3.value),
}
SHAPES = [(4, 64), (3, 50), (2, 3, 33), (7,), (2, 1)]


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def scales_of(x, scheme):
    """The scales of a tensor and the scale of these scales, if there is one."""
    lo, hi = block_range(x, scheme)
    over = tensor_scale_from_range(lo, hi, scheme) if scheme.scale.two_level else None
    return qparams_from_range(lo, hi, scheme, over)[0], over


def with_zeros(shape, factor=1.0):
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float()) * factor
    x.view(-1)[: x.numel() // 3] = 0
    return x


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("factor", [1.0, 1e-20, 1e6, 1e-38, 1e30], ids=str)
def test_scales_come_back(name, axis, factor):
    scheme = replace(SCHEMES[name], axis=axis)
    for shape in SHAPES:
        x = with_zeros(shape, factor)
        scale, over = scales_of(x, scheme)
        stored = encode_scale(scale, scheme, over)
        assert stored.dtype == stored_dtype(scheme)
        assert stored.shape == stored_shape(tuple(scale.shape), scheme)
        back = decode_scale(stored, scheme, shape, over)
        assert back.shape == scale.shape and back.dtype == scale.dtype
        assert torch.equal(bits(back), bits(scale)), shape


@pytest.mark.parametrize(("name", "bias"), [("fp4", 127), ("fp8_e4m3", 127), ("mx", 127 + 6)])
def test_every_shared_exponent(name, bias):
    """E8M0 is the biased exponent: 2^-127 is 0, 2^127 is 254. ml_dtypes reads the same numbers."""
    scheme = grouped(name, 32)
    codes = np.arange(255, dtype=np.uint8)
    stored = torch.from_numpy(codes).reshape(255, 1)
    scale = decode_scale(stored, scheme, (255, 32))
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64) * 2.0 ** (127 - bias)
    assert scale.double().flatten().tolist() == expected.tolist()
    assert torch.equal(encode_scale(scale, scheme), stored)


def test_block_floating_point_stores_the_exponent_of_the_largest_value():
    x = torch.zeros(3, 8)
    x[0, 2], x[1, 1], x[1, 2] = 5.0, 0.75, 0.1
    scheme = SCHEMES["bfp16"]
    stored = encode_scale(dynamic_qparams(x, scheme)[0], scheme)
    assert stored.flatten().tolist() == [127 + 2, 127 - 1, 0]


@pytest.mark.parametrize("name", ["mx6", "mx9"])
def test_bytes_of_shared_microexponents(name):
    """The exponent of the block, then a bit for each pair whose values are all below it."""
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 2], x[0, 5], x[0, 15] = 4.5, 3.9, -6.0, 0.1  # exponents 2, 1, 2, -4
    x[0, 16:] = 0.25
    stored = encode_scale(dynamic_qparams(x, SCHEMES[name])[0], SCHEMES[name])
    assert stored.shape == (2, 2, 2)
    assert stored[0].tolist() == [[127 + 2, 0b11111010], [127 - 2, 0]]
    assert stored[1].tolist() == [[0, 0], [0, 0]]


def test_blocks_of_32_have_two_bytes_of_shifts():
    x = torch.ones(1, 32)
    x[0, 4:6], x[0, 30:] = 0.5, 0.25
    scheme = SCHEMES["mx9 of 32"]
    stored = encode_scale(dynamic_qparams(x, scheme)[0], scheme)
    assert stored.tolist() == [[[127, 0b100, 0b10000000]]]


def test_pairs_that_a_ragged_block_lacks_have_no_shift():
    x = torch.ones(1, 21)
    x[0, 2:4] = 0.5
    scheme = SCHEMES["mx6"]
    stored = encode_scale(dynamic_qparams(x, scheme)[0], scheme)
    assert stored.tolist() == [[[127, 0b10], [127, 0]]]


def test_shifts_lie_along_the_last_axis_whatever_the_axis_of_the_blocks():
    x = torch.randn(50, 3)
    down, across = replace(SCHEMES["mx9"], axis=0), SCHEMES["mx9"]
    scale = dynamic_qparams(x, down)[0]
    assert scale.shape == (25, 3)
    stored = encode_scale(scale, down)
    assert stored.shape == (3, 4, 2)
    assert torch.equal(stored, encode_scale(dynamic_qparams(x.t(), across)[0], across))


def test_stored_e4m3_scales_are_what_the_definition_says():
    x = torch.randn(4, 64)
    scale, over = scales_of(x, SCHEMES["nvfp4"])
    amax = x.numpy().reshape(4, 4, 16).__abs__().max(-1)
    total = np.float32(amax.max() / np.float32(6 * 448))
    expected = ((amax / np.float32(6)) / total).astype(ml_dtypes.float8_e4m3fn)
    assert over.item() == total
    stored = encode_scale(scale, SCHEMES["nvfp4"], over)
    assert stored.float().tolist() == expected.astype(np.float32).tolist()
    assert stored.float().max() == 448


def test_every_e5m3_scale():
    """From the smallest, 2^-17, to the largest, 114688: no zero, infinity or NaN."""
    stored = torch.arange(1, 255, dtype=torch.uint8).reshape(254, 1)
    scale = decode_scale(stored, SCHEMES["amdfp4"], (254, 16))
    assert scale.min() == 2.0**-17 and scale.max() == 114688
    assert torch.equal(encode_scale(scale, SCHEMES["amdfp4"]), stored)


@pytest.mark.parametrize("name", ["nvfp4", "amdfp4", "two-level e5m3"])
def test_no_scale_becomes_zero(name):
    x = torch.full((2, 32), 1e-30)
    x[0, 0] = 1e5
    scale, over = scales_of(x, SCHEMES[name])
    assert (encode_scale(scale, SCHEMES[name], over).float() > 0).all()
