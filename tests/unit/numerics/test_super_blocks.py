"""Scales in super-blocks: integers times float16 numbers."""

import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dynamic_qparams, fake_quantize
from quark.torch.numerics.scale_formats import SUPER_BLOCKS
from quark.torch.numerics.scales import round_qparams
from quark.torch.numerics.scheme import Scheme
from quark.torch.numerics.super_blocks import factors, minima, round_to_super_blocks

LARGEST = {"uint4x16": 15, "int6x16": 31, "uint6x8": 63, "int8x16": 127}


def numbers(*shape, exponent=-5):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(shape, generator=generator) * 2.0**exponent


def rounded(x, name, least=1):
    """As the definition, one super-block after the other, in float64."""
    span, top = SUPER_BLOCKS[name].span, LARGEST[name]
    out = x.double().numpy().copy()
    for row in out:
        for start in range(0, len(row), span):
            block = row[start : start + span]
            unit = np.float64(np.float16(np.float32(block.max()) / np.float32(top)))
            unit = max(unit, 2.0**-24)
            block[:] = np.clip(np.round(block / unit), least, top) * unit
    return torch.from_numpy(out).float()


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_as_the_definition(name, least):
    x = numbers(5, 40, exponent=-2)  # the last super-block is not full
    x[0, :16] = 0
    result = round_to_super_blocks(x, SUPER_BLOCKS[name], -1, least)
    assert result.equal(rounded(x, name, least))
    assert round_to_super_blocks(x.T, SUPER_BLOCKS[name], 0, least).equal(result.T)


@pytest.mark.parametrize("exponent", [-30, -17, -14, 0, 12])
@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_factors_give_the_products(name, exponent):
    to = SUPER_BLOCKS[name]
    products = round_to_super_blocks(numbers(4, 32, exponent=exponent), to, -1)
    unit, integers = factors(products, to.fmt, to.span)
    assert unit.dtype == torch.float16
    assert to.fmt.qmin <= integers.min() and integers.max() <= to.fmt.qmax
    assert (unit.float().unsqueeze(-1) * integers).flatten(1).equal(products)


def test_factors_of_any_stored_integers():
    """Integers need not reach the largest one, and may be negative."""
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(-128, 128, (64, 16), generator=generator)
    integers[:8] //= 9
    integers[0] = 0
    integers[1, 5] = -128
    unit = torch.randn(64, 1, generator=generator).half().float()
    products = unit * integers
    found, whole = factors(products, Dtype.int8.value, 16)
    assert (found.float().unsqueeze(-1) * whole).flatten(1).equal(products)


def test_a_coarse_number_is_large_enough():
    """The nearest float16 number to 1.4 * 2^-24 would cut the largest scale to 1 / 1.4 of it."""
    to = SUPER_BLOCKS["uint6x8"]
    x = torch.full((1, 8), 1.4 * 63 * 2.0**-24)
    torch.testing.assert_close(round_to_super_blocks(x, to, -1), x, rtol=0.02, atol=0)


def test_other_products_are_refused():
    with pytest.raises(
        ValueError, match="1 super-blocks of 8 scales are not uint6 times a float16"
    ):
        factors(torch.cat([numbers(1, 8), torch.full((1, 8), 0.5)]), Dtype.uint6.value, 8)


@pytest.mark.parametrize("exponent", [-20, -5, 8])
def test_minima_are_found_in_zero_points(exponent):
    to = SUPER_BLOCKS["uint6x8"]
    products = round_to_super_blocks(numbers(64, 64, exponent=exponent), to, -1, least=0)
    scale = round_to_super_blocks(numbers(64, 64).flip(0), to, -1)
    assert minima(scale, products / scale, to.fmt).equal(products)


@pytest.mark.parametrize(
    ("dtype", "name", "group"), [("uint4", "uint6x8", 32), ("uint2", "uint4x16", 16)]
)
def test_values_with_minima(dtype, name, group):
    fmt = Dtype[dtype].value
    scheme = Scheme(
        fmt,
        QSchemeType.per_group,
        -1,
        group,
        symmetric=False,
        scale=SUPER_BLOCKS[name],
        float_zero_point=True,
    )
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(2))
    scale, zero_point = dynamic_qparams(x, scheme)
    minimum = (zero_point * scale).repeat_interleave(group, 1)
    step = scale.repeat_interleave(group, 1)
    values = fake_quantize(x, scale, zero_point, scheme)
    codes = ((x + minimum) / step).round().clamp(0, fmt.qmax)
    torch.testing.assert_close(values, codes * step - minimum, rtol=1e-5, atol=1e-5)
    assert (values - x).abs().max() < (0.3 if dtype == "uint4" else 1.5)


def test_any_scales_become_those_of_super_blocks():
    to = SUPER_BLOCKS["uint6x8"]
    scheme = Scheme(
        Dtype.uint4.value,
        QSchemeType.per_group,
        -1,
        32,
        symmetric=False,
        scale=to,
        float_zero_point=True,
    )
    scale, zero_point = numbers(4, 16), 15 * numbers(4, 16, exponent=0).flip(0)
    new, zeros = round_qparams(scale, zero_point, scheme)
    factors(new, to.fmt, to.span)
    factors(minima(new, zeros, to.fmt), to.fmt, to.span)
    unit = (scale * zero_point).reshape(4, 2, 8).amax(-1) / 63
    error = (new * zeros - scale * zero_point).abs().reshape(4, 2, 8).amax(-1)
    assert (error <= 0.51 * unit).all()
