"""Quantization against what torch computes, its bounds, its pieces and its gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import (
    dequantize,
    dynamic_qparams,
    fake_quantize,
    fake_quantize_,
    quantize,
)
from quark.torch.numerics.scheme import Scheme
from tests.unit.numerics.kinds import (
    CASTS,
    ENCODED,
    FLOATS,
    INTEGERS,
    NATIVE,
    encode,
    values_of,
)

# Integers of 32 bits are in test_wide_integers.py, shared exponents in test_block_formats.py.
SCALED = [*INTEGERS, *FLOATS]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
GRANULARITIES = {
    "tensor": {},
    "channel": {"qscheme": QSchemeType.per_channel},
    "group": {"qscheme": QSchemeType.per_group},
    "token": {"qscheme": QSchemeType.per_channel, "per_token": True},
}


def bits(x):
    """A tensor as integers, which tell -0 from 0."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def tensor_with(scheme, *shape):
    """A tensor and what belongs to its range."""
    x = torch.randn(*shape)
    return x, *dynamic_qparams(x, scheme)


# ---- against other implementations --------------------------------------------------------------


def with_ties(scale, count=4096):
    """Random values, values in the middle of two codes, and values far out."""
    ties = (torch.arange(-300, 300) + 0.5) * scale
    return torch.cat([torch.randn(count) * 100 * scale, ties, torch.tensor([0.0, -0.0, 9e9, -9e9])])


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0237, 3.1e-5])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_per_tensor_as_torch(name, place, scale):
    fmt = Dtype[name].value
    offset = torch.tensor(round(fmt.qmin + place * (fmt.qmax - fmt.qmin)), dtype=torch.int32)
    scale = torch.tensor(scale)
    x = with_ties(scale)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, offset, fmt.qmin, fmt.qmax)
    assert same(fake_quantize(x, scale, offset, Scheme(fmt, symmetric=False)), expected)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_symmetric_integers_as_torch(name):
    fmt, scale = Dtype[name].value, torch.tensor(0.0237)
    x, zero = with_ties(scale), torch.tensor(0, dtype=torch.int32)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, zero, fmt.qmin, fmt.qmax)
    assert same(fake_quantize(x, scale, zero, Scheme(fmt)), expected)
    assert same(fake_quantize(x, scale, None, Scheme(fmt)), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_per_channel_as_torch(name, symmetric, axis):
    fmt = Dtype[name].value
    scheme = Scheme(fmt, QSchemeType.per_channel, axis, symmetric=symmetric)
    x, scale, offset = tensor_with(scheme, 5, 6, 7)
    expected = torch.fake_quantize_per_channel_affine(x, scale, offset, axis, fmt.qmin, fmt.qmax)
    assert same(fake_quantize(x, scale, offset, scheme), expected)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0067424, 1e-30])
@pytest.mark.parametrize("name", NATIVE)
def test_fp8_as_casts_of_clamped_values(name, scale):
    fmt, scale = Dtype[name].value, torch.tensor(scale)
    every_code = torch.arange(256, dtype=torch.uint8).view(fmt.code_dtype).float()
    every_code = every_code[every_code.isfinite()]
    middles = (every_code[1:] + every_code[:-1]) / 2
    x = torch.cat([torch.randn(4096) * fmt.max_value / 3, every_code, middles]) * scale
    clamped = (x / scale).clamp(-fmt.max_value, fmt.max_value)
    expected = clamped.to(fmt.code_dtype)
    assert same(quantize(x, scale, None, Scheme(fmt)), expected)
    assert same(fake_quantize(x, scale, None, Scheme(fmt)), expected.float() * scale)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0067424, 1e-30])
@pytest.mark.parametrize("name", ENCODED)
def test_narrow_floats_as_casts_of_clamped_values(name, scale):
    fmt, scale = Dtype[name].value, torch.tensor(scale)
    every_code = torch.from_numpy(values_of(name)).sort().values
    middles = (every_code[1:] + every_code[:-1]) / 2
    x = torch.cat([torch.randn(4096) * fmt.max_value / 3, every_code, middles]) * scale
    clamped = (x / scale).clamp(-fmt.max_value, fmt.max_value)
    codes = encode(clamped.numpy(), name)
    assert quantize(x, scale, None, Scheme(fmt)).tolist() == codes.tolist()
    values = torch.from_numpy(values_of(name)[codes]) * scale
    assert same(fake_quantize(x, scale, None, Scheme(fmt)), values)


@pytest.mark.parametrize("offset", [0, 3, 2.25])
@pytest.mark.parametrize("mode", RoundType, ids=lambda m: m.name)
def test_rounding_of_integer_codes(mode, offset):
    """Halves count from zero, or from the code where the zero point keeps its fraction."""
    fractional = isinstance(offset, float)
    scheme = Scheme(Dtype.int8.value, symmetric=False, rounding=mode, float_zero_point=fractional)
    x = np.arange(-40, 40, dtype=np.float32) / 4
    moved = x + offset if fractional else x
    rounded = {
        RoundType.half_even: np.rint(moved),
        RoundType.floor: np.floor(moved),
        RoundType.round: np.sign(moved) * np.floor(np.abs(moved) + 0.5),
    }[mode]
    expected = rounded if fractional else rounded + offset
    codes = quantize(torch.from_numpy(x), torch.tensor(1.0), torch.tensor(offset), scheme)
    assert codes.tolist() == expected.tolist()


# ---- properties ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
def test_inputs_are_left_alone(dtype):
    scheme = Scheme(dtype.value)
    x, scale, zero_point = tensor_with(replace(scheme, fmt=Dtype.int8.value), 4, 6)
    if not scheme.fmt.scaled:
        scale = zero_point = None
    given_x = x.clone()
    codes = quantize(x, scale, zero_point, scheme)
    given_codes = bits(codes).clone()
    fake_quantize(x, scale, zero_point, scheme)
    dequantize(codes, scale, zero_point, scheme)
    assert same(x, given_x) and torch.equal(bits(codes), given_codes)
    assert codes.dtype == scheme.fmt.code_dtype


@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.int4, Dtype.uint4], ids=lambda d: d.name)
def test_codes_of_a_wider_type(dtype):
    """Codes may come in any integer type."""
    fmt = dtype.value
    codes = torch.arange(fmt.qmin, fmt.qmax + 1)
    scale, offset = torch.tensor(0.5), torch.tensor(1)
    scheme = Scheme(fmt, symmetric=False)
    values = dequantize(codes.to(torch.int32), scale, offset, scheme)
    assert values.tolist() == [(c - 1) / 2 for c in codes.tolist()]


@pytest.mark.parametrize("mode", RoundType, ids=lambda m: m.name)
@pytest.mark.parametrize("name", SCALED)
def test_monotone(name, mode):
    x = torch.cat([torch.randn(5000), torch.linspace(-4, 4, 5001)]).sort().values
    scheme = Scheme(Dtype[name].value, symmetric=name in FLOATS, rounding=mode)
    y = fake_quantize(x, *dynamic_qparams(x[100:-100], scheme), scheme)
    assert (y.diff() >= 0).all() and len(y.unique()) > 2


@pytest.mark.parametrize("mode", RoundType, ids=lambda m: m.name)
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_err_by_half_a_step(name, symmetric, mode):
    fmt = Dtype[name].value
    scheme = Scheme(fmt, QSchemeType.per_channel, 0, symmetric=symmetric, rounding=mode)
    x, scale, offset = tensor_with(scheme, 8, 2000)
    low, high = ((end - offset) * scale for end in (fmt.qmin, fmt.qmax))
    inside = (x >= low[:, None]) & (x <= high[:, None])
    error = ((x - fake_quantize(x, scale, offset, scheme)) / scale[:, None])[inside]
    assert inside.float().mean() > 0.8
    slack = max(1e-4, 2.0 ** (fmt.bits - 24))  # float32 has 24 bits
    if mode is RoundType.floor:
        assert error.min() >= -slack and error.max() <= 1 + slack
    else:
        assert error.abs().max() <= 0.5 + slack
        assert error.abs().max() > 0.45, "the bound is not put to the test"


@pytest.mark.parametrize("name", FLOATS)
def test_floats_err_by_half_a_step_of_the_grid(name):
    scheme = Scheme(Dtype[name].value)
    x, scale, _ = tensor_with(scheme, 20000)
    exponent = torch.frexp(x / scale).exponent - 1
    step = 2.0 ** (exponent.clamp(min=scheme.fmt.min_exponent) - scheme.fmt.mantissa_bits)
    error = (x - fake_quantize(x, scale, None, scheme)).abs() / scale / step
    assert 0.45 < error.max() <= 0.5 + 1e-4


@pytest.mark.parametrize("name", SCALED)
def test_tokens_do_not_see_each_other(name):
    scheme = Scheme(Dtype[name].value, QSchemeType.per_channel, -1, per_token=True)
    x = torch.randn(3, 5, 16) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    together = fake_quantize(x, *dynamic_qparams(x, scheme), scheme)
    for row, alone in zip(together.flatten(0, 1), x.flatten(0, 1), strict=True):
        assert same(row, fake_quantize(alone, *dynamic_qparams(alone, scheme), scheme))


# ---- the ends of the range ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
def test_infinity_saturates_and_nan_stays(name):
    fmt = Dtype[name].value
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    y = fake_quantize(x, torch.tensor(1.0), None, Scheme(fmt))
    ends = (fmt.max_value, -fmt.max_value) if fmt.is_float else (fmt.qmax, fmt.qmin)
    assert tuple(y[:2].tolist()) == ends
    assert y[2].isnan() and y[3] == 1.0


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_casts_saturate_and_nan_stays(name, kind):
    x = torch.tensor([math.inf, -math.inf, 3.3e38, 65504.0, math.nan]).to(kind)
    y = fake_quantize(x, None, None, Scheme(Dtype[name].value))
    top = Dtype[name].value.max_value
    assert y[:4].isfinite().all() and y[4].isnan()
    assert y[0] == -y[1] == torch.tensor(top).to(kind).nan_to_num()


@pytest.mark.parametrize("name", SCALED)
def test_float16_does_not_overflow(name):
    """The lowest code of a symmetric range lies half a step beyond the largest value."""
    x = torch.tensor([65504.0, -65504.0, 100.0], dtype=torch.float16)
    scheme = Scheme(Dtype[name].value)
    y = fake_quantize(x, *dynamic_qparams(x, scheme), scheme)
    assert y.isfinite().all() and y[1] <= -60000


@pytest.mark.parametrize("dtype", Dtype, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(0,), (0, 8), (4, 0)], ids=str)
def test_empty_tensors(shape, dtype):
    scheme, x = Scheme(dtype.value), torch.empty(shape)
    scale = torch.tensor(1.0) if scheme.fmt.scaled else None
    codes = quantize(x, scale, None, scheme)
    assert codes.shape == shape and codes.dtype == scheme.fmt.code_dtype
    assert dequantize(codes, scale, None, scheme, torch.bfloat16).dtype == torch.bfloat16
    assert fake_quantize(x, scale, None, scheme).shape == shape
    assert fake_quantize_(x, scale, None, scheme) is x


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("function", [quantize, dequantize, fake_quantize, fake_quantize_])
def test_scale_is_required(function, name):
    x = torch.randn(4)
    x = (
        quantize(x, torch.tensor(1.0), None, Scheme(Dtype[name].value))
        if "de" in str(function)
        else x
    )
    with pytest.raises(ValueError, match=f"{name} needs a scale, but none was given"):
        function(x, None, None, Scheme(Dtype[name].value))


@pytest.mark.parametrize("part", ["scale", "zero point"])
def test_wrong_count_of_scales(part):
    scheme = Scheme(Dtype.uint8.value, QSchemeType.per_channel, 0, symmetric=False)
    x, scale, offset = tensor_with(scheme, 4, 6)
    given = (scale[:3], offset) if part == "scale" else (scale, offset[:3])
    with pytest.raises(ValueError, match=r"shape \(4, 6\) has 4 blocks .* shape \(3,\) was given"):
        fake_quantize(x, *given, scheme)


# ---- pieces, and the result in place -------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ["uint4", "uint16", "fp8_e4m3", "fp6_e2m3"])
def test_pieces_make_no_difference(name, granularity, axis, chunk, monkeypatch):
    scheme = Scheme(
        Dtype[name].value,
        **GRANULARITIES[granularity],
        axis=axis,
        group=5,
        symmetric=name in FLOATS,
    )
    x, *qparams = tensor_with(scheme, 23, 37)
    whole = fake_quantize(x, *qparams, scheme), quantize(x, *qparams, scheme)
    calls = []
    original = qdq._pieces
    monkeypatch.setattr(qdq, "CHUNK", chunk)
    monkeypatch.setattr(qdq, "_pieces", lambda *a: calls.extend(p := list(original(*a))) or p)
    assert same(fake_quantize(x, *qparams, scheme), whole[0])
    assert len(calls) > 1 or chunk == 1000
    assert same(quantize(x, *qparams, scheme), whole[1])
    assert same(fake_quantize_(x.clone(), *qparams, scheme), whole[0])


def test_in_place_without_a_copy():
    scheme = Scheme(Dtype.int8.value, QSchemeType.per_group, -1, 16)
    x, *qparams = tensor_with(scheme, 8, 64)
    expected, start = fake_quantize(x, *qparams, scheme), x.data_ptr()
    assert fake_quantize_(x, *qparams, scheme) is x
    assert x.data_ptr() == start and same(x, expected)


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", SCALED)
def test_gradients_pass_inside_and_stop_outside(name, granularity, kind):
    scheme = Scheme(Dtype[name].value, **GRANULARITIES[granularity], axis=0, group=2)
    x = torch.randn(6, 10).to(kind)
    scale, offset = dynamic_qparams(x, scheme)
    x[0, 0], x[1, 1], x[2, 2] = 1e4, -1e4, 0.0
    outside = torch.zeros(6, 10, dtype=torch.bool)
    outside[0, 0] = outside[1, 1] = True
    x.requires_grad_()
    slope = torch.randn(6, 10).to(kind)
    fake_quantize(x, scale, offset, scheme).backward(slope)
    assert torch.equal(x.grad, slope.masked_fill(outside, 0))


@pytest.mark.parametrize("name", INTEGERS)
def test_gradients_of_integers_as_torch(name):
    fmt = Dtype[name].value
    scale, offset = torch.tensor(0.0237), torch.tensor(fmt.qmin + 1, dtype=torch.int32)
    x = torch.randn(2000) * scale * fmt.qmax
    theirs, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    slope = torch.randn(2000)
    faked = torch.fake_quantize_per_tensor_affine(theirs, scale, offset, fmt.qmin, fmt.qmax)
    faked.backward(slope)
    fake_quantize(ours, scale, offset, Scheme(fmt, symmetric=False)).backward(slope)
    assert torch.equal(ours.grad, theirs.grad)
    assert 0 < ours.grad.count_nonzero() < 2000


@pytest.mark.parametrize("name", CASTS)
def test_gradients_pass_casts(name):
    x = torch.randn(10, requires_grad=True)
    slope = torch.randn(10)
    fake_quantize(x, None, None, Scheme(Dtype[name].value)).backward(slope)
    assert torch.equal(x.grad, slope)


def test_nothing_is_kept_for_a_gradient_nobody_wants():
    x, scale, offset = tensor_with(Scheme(Dtype.int8.value), 8)
    assert fake_quantize(x, scale, offset, Scheme(Dtype.int8.value)).grad_fn is None
