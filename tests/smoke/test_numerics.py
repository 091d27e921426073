"""Every number format and every scheme, once."""

import pytest
import torch
from torch import nn

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.packing import pack, unpack
from quark.torch.quantization.config.presets import scheme, scheme_names
from tests.configurations import preset, quantized

pytestmark = pytest.mark.smoke


def test_codes_of_every_format_come_back_from_packed_words():
    for dtype in Dtype:
        fmt = dtype.value
        codes = torch.randint(0, 2, (3, 40)).to(fmt.code_dtype)
        words = pack(codes, fmt)
        assert words.dtype == fmt.storage_dtype, dtype.name
        assert unpack(words, fmt, 40).float().equal(codes.float()), dtype.name


@torch.no_grad()
def test_every_scheme_quantizes_a_layer():
    x = torch.randn(4, 128)
    for name in scheme_names():
        layer = nn.Linear(128, 8)
        expected = layer(x)
        model = quantized(nn.Sequential(layer), preset(name, exclude=()), [x])
        error = (model(x) - expected).norm() / expected.norm()
        assert 0 < error < 0.8, (name, scheme(name, 32))
