"""Scales of blocks in e4m3 and e5m3, and values under them, against exact rational arithmetic.

The oracle takes the definitions literally: every value of a format is a fraction, and the nearest
one is taken, of two equally near ones that with the even code.
"""

from bisect import bisect_left
from fractions import Fraction

import pytest
import torch

from quark.torch.numerics.codec import decode
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.qdq import dynamic_qparams, quantize
from tests.configurations import groups

BLOCK = 16


def values_of(exponent_bits, mantissa_bits, largest):
    """Return the values of an unsigned float format in the order of their codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits) + (exponent > 0)
        values.append(fraction * Fraction(2) ** (max(exponent, 1) - bias))
    return [value for value in values if value <= largest]


FP4, E4M3, E5M3 = values_of(2, 1, 6), values_of(4, 3, 448), values_of(5, 3, 114688)


def nearest(x, values):
    at = bisect_left(values, x)
    if at == len(values):
        return values[-1]
    if values[at] == x or at == 0:
        return values[at]
    below, above = x - values[at - 1], values[at] - x
    return values[at - 1 if below < above or (below == above and at % 2) else at]


def inputs(scale_format):
    """Make tensors of many magnitudes; half of them have few bits, which makes ties frequent."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(12):
        x = torch.randn(8, 4 * BLOCK, generator=generator)
        lowest = -5 if scale_format == "e4m3" else -8
        x *= torch.logspace(lowest, 0, 8).unsqueeze(1) if seed % 3 == 0 else 1
        yield x.bfloat16().float() if seed % 2 else x


@pytest.mark.parametrize("scale_format", ["e4m3", "e5m3"])
def test_against_exact_arithmetic(scale_format):
    scheme = groups("fp4", size=BLOCK, scale_format=scale_format).scheme
    smallest = Fraction(2) ** (-9 if scale_format == "e4m3" else -17)
    for x in inputs(scale_format):
        # e4m3: the tensor scale maps the largest value to 6 * 448. e5m3 has no tensor scale.
        unit = Fraction(x.abs().max().item()) / (6 * 448) if scale_format == "e4m3" else Fraction(1)
        scales, _ = dynamic_qparams(x, scheme)
        codes = decode(quantize(x, scales, None, scheme), Dtype.fp4.value)
        blocks = (t.reshape(-1, BLOCK).tolist() for t in (x, codes))
        for scale, block, found in zip(scales.flatten().tolist(), *blocks, strict=True):
            magnitudes = [abs(Fraction(value)) for value in block]
            ratio = nearest(max(magnitudes) / 6 / unit, E4M3 if scale_format == "e4m3" else E5M3)
            exact = max(ratio, smallest) * unit
            assert abs(Fraction(scale) / exact - 1) < Fraction(1, 10**6)
            for magnitude, code in zip(magnitudes, found, strict=True):
                error = abs(magnitude / exact - abs(Fraction(code)))
                least = abs(magnitude / exact - nearest(magnitude / exact, FP4))
                # Where two values are equally near, float32 may take either.
                assert error <= least + Fraction(1, 10**6)


def test_smallest_scales():
    """A block below the smallest scale is rounded to multiples of half of that scale."""
    x = torch.full((1, BLOCK), 2.0**-18)
    for factor, expected in ((1.0, 2.0**-18), (0.4, 0.0), (0.6, 2.0**-18)):
        scheme = groups("fp4", size=BLOCK, scale_format="e5m3").scheme
        scales, _ = dynamic_qparams(x * factor, scheme)
        assert scales.item() == 2.0**-17
        codes = decode(quantize(x * factor, scales, None, scheme), Dtype.fp4.value)
        assert (codes * scales).eq(expected).all()
