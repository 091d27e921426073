"""Codes that are the same after their values were rounded to a narrow type."""

from dataclasses import replace

import pytest
import torch

from quark.torch.numerics.code_recovery import recovers_codes
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, recover_codes
from quark.torch.numerics.scale_formats import E8M0
from quark.torch.numerics.scheme import Scheme

WIDE = (torch.bfloat16, torch.float16, torch.float32)


def all_codes(scheme, rows):
    """Every code of an integer format in each row."""
    fmt = scheme.fmt
    return torch.arange(fmt.qmin, fmt.qmax + 1).to(fmt.code_dtype).expand(rows, -1)


def scales(dtype, rows=4096, factor=1.0):
    """Scales with every mantissa near those that round the most, in the range of a type."""
    generator = torch.Generator().manual_seed(0)
    return (1 + torch.rand(rows, generator=generator) / 64) * factor


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["int8", "int4", "uint4", "int2"])
def test_integers(name, dtype):
    scheme = Scheme(Dtype[name].value, QSchemeType.per_channel)
    codes = all_codes(scheme, 4096)
    for factor in (1.0, 2.0**-10):
        scale = scales(dtype, factor=factor)
        zeros = None
        if name == "uint4":
            zeros = torch.randint(0, 16, scale.shape, dtype=torch.int32)
        assert recovers_codes(scale, scheme, dtype)
        values = dequantize(codes, scale, zeros, scheme, dtype)
        assert torch.equal(recover_codes(values, scale, zeros, scheme), codes)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4", "fp6_e2m3", "fp6_e3m2"])
def test_floats(name, dtype):
    scheme = Scheme(Dtype[name].value, QSchemeType.per_channel)
    fmt = scheme.fmt
    values = torch.arange(256, dtype=torch.uint8)
    codes = values.view(fmt.code_dtype) if fmt.native else values[: 1 << fmt.bits]
    codes = codes[codes.float().isfinite()].expand(512, -1)
    scale = scales(dtype, 512)
    has_range = name != "fp8_e5m2" or dtype != torch.float16  # which have the same exponents
    assert recovers_codes(scale, scheme, dtype) is has_range
    if not has_range:
        return
    stored = dequantize(codes, scale, None, scheme, dtype)
    found = recover_codes(stored, scale, None, scheme)
    assert torch.equal(found.view(torch.uint8), codes.contiguous().view(torch.uint8))


def test_eight_bits_with_an_offset_are_lost_in_bfloat16():
    """255 steps of 1 / 256: the neighbor may be nearer."""
    scheme = replace(Scheme(Dtype.uint8.value, QSchemeType.per_channel), symmetric=False)
    scale, codes = scales(torch.bfloat16), all_codes(scheme, 4096)
    zeros = torch.zeros(4096, dtype=torch.int32)
    values = dequantize(codes, scale, zeros, scheme, torch.bfloat16)
    assert not torch.equal(recover_codes(values, scale, zeros, scheme), codes)
    assert not recovers_codes(scale, scheme, torch.bfloat16)
    assert recovers_codes(scale, scheme, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "scale", "lost"),
    [
        (torch.float16, 2.0**-14, False),
        (torch.float16, 2.0**-20 * 1.001, True),  # 3 * 2^-20 is subnormal
        (torch.bfloat16, 2.0**-126, False),
        (torch.float16, 600.0, True),  # 127 * 600 is beyond the range
    ],
)
def test_values_that_leave_the_range(dtype, scale, lost):
    scheme = Scheme(Dtype.int8.value)
    number = torch.tensor(scale)
    assert recovers_codes(number, scheme, dtype) is not lost
    codes = all_codes(scheme, 1)
    same = torch.equal(
        recover_codes(dequantize(codes, number, None, scheme, dtype), number, None, scheme), codes
    )
    assert same or lost


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("bfloat16", torch.ones(1)),
        ("int8", None),
        ("int8", torch.ones(0)),
        ("int32", torch.ones(1)),
    ],
)
def test_no_promise(name, scale):
    assert not recovers_codes(scale, Scheme(Dtype[name].value), torch.float32)


def test_shared_exponents():
    scheme = Scheme(Dtype.int8.value, QSchemeType.per_group, -1, 256, scale=E8M0)
    codes = all_codes(scheme, 64)
    scale = torch.exp2(torch.arange(-32.0, 32.0)).unsqueeze(-1)
    assert recovers_codes(scale, scheme, torch.bfloat16)
    values = dequantize(codes, scale, None, scheme, torch.bfloat16)
    assert torch.equal(recover_codes(values, scale, None, scheme), codes)
