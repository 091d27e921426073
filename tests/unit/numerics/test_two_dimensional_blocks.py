"""Blocks of rows and columns, and groups and blocks of weights with more than two axes."""

import numpy as np
import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.packing import pack, unpack
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, fake_quantize, quantize
from quark.torch.numerics.scale_formats import E8M0, FLOAT32
from quark.torch.numerics.scheme import Scheme

BLOCK, GROUP = QSchemeType.per_block, QSchemeType.per_group
NAMES = ["int8", "uint4", "fp8_e4m3", "fp4"]


def scheme_of(name, block, **options):
    return Scheme(Dtype[name].value, BLOCK, block=block, **options)


def one_by_one(x, block, name):
    """Quantize each block as a tensor of its own."""
    out = x.clone()
    rows, columns = (n if b == -1 else b for n, b in zip(x.shape[-2:], block, strict=True))
    alone = Scheme(Dtype[name].value)
    scales = []
    for at in np.ndindex(x.shape[:-2]):
        for top in range(0, x.shape[-2], rows):
            for left in range(0, x.shape[-1], columns):
                where = (*at, slice(top, top + rows), slice(left, left + columns))
                qparams = dynamic_qparams(x[where], alone)
                scales.append(qparams[0])
                out[where] = fake_quantize(x[where], *qparams, alone)
    return torch.stack(scales), out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "block", "grid"),
    [
        ((256, 384), (128, 128), (2, 3)),
        ((200, 300), (128, 128), (2, 3)),
        ((5, 7), (128, 128), (1, 1)),
        ((5, 7), (2, 3), (3, 3)),
        ((6, 8), (-1, 4), (1, 2)),
        ((6, 8), (1, -1), (6, 1)),
        ((2, 5, 7), (2, 3), (2, 3, 3)),
    ],
)
def test_each_block_as_a_tensor_of_its_own(name, shape, block, grid):
    scheme = scheme_of(name, block)
    x = torch.randn(shape)
    if name.startswith("uint"):
        x = x.abs()
    qparams = dynamic_qparams(x, scheme)
    assert qparams[0].shape == scheme.scale_shape(shape) == grid
    scales, values = one_by_one(x, block, name)
    assert torch.equal(qparams[0].flatten(), scales)
    assert torch.equal(fake_quantize(x, *qparams, scheme), values)
    codes = unpack(pack(quantize(x, *qparams, scheme), scheme.fmt), scheme.fmt, shape[-1])
    assert torch.equal(dequantize(codes, *qparams, scheme), values)


def test_ragged_blocks_count_only_their_own_values():
    x = torch.full((3, 3), -2.0)
    x[2, 2] = -1.0
    scheme = scheme_of("int8", (2, 2), symmetric=False)
    scale, zero_point = dynamic_qparams(x, scheme)
    assert torch.equal(scale, torch.tensor([[2.0, 2.0], [2.0, 1.0]]) / 255)
    assert (zero_point == 127).all()


@pytest.mark.parametrize("shape", [(7,), ()])
def test_blocks_need_two_axes(shape):
    with pytest.raises(ValueError, match="two axes"):
        scheme_of("int8", (2, 2)).blocks(shape)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("int4", FLOAT32),
        ("fp4", FLOAT32),
        ("fp4", E8M0),
        ("mx", E8M0),
        ("mx9", FLOAT32),
        ("bfp16", FLOAT32),
    ],
    ids=["int4", "fp4", "mxfp4", "mxint8", "mx9", "bfp16"],
)
@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (2, 8, 2, 2), (3, 5, 7), (4, 33)])
def test_groups_of_a_weight_run_over_all_axes_but_the_first(name, scale, shape):
    scheme = Scheme(Dtype[name].value, GROUP, axis=-1, group=16, flat=True, scale=scale)
    x = torch.randn(shape)
    matrix = x.reshape(shape[0], -1)
    scale, zero_point = dynamic_qparams(x, scheme)
    size = scheme.fmt.sub_block or 16
    assert scale.shape == (shape[0], -(-matrix.shape[1] // size))
    faked = fake_quantize(x, scale, zero_point, scheme)
    assert faked.shape == shape
    as_matrix = fake_quantize(matrix, *dynamic_qparams(matrix, scheme), scheme)
    assert torch.equal(faked.reshape(shape[0], -1), as_matrix)
    codes = quantize(x, scale, zero_point, scheme)
    assert codes.shape == shape
    assert torch.equal(dequantize(codes, scale, zero_point, scheme), faked)


def test_blocks_of_a_weight_run_over_all_axes_but_the_first():
    scheme = scheme_of("int8", (2, 16), flat=True)
    x = torch.randn(4, 3, 3, 3)
    scale, zero_point = dynamic_qparams(x, scheme)
    assert scale.shape == (2, 2)
    scales, values = one_by_one(x.reshape(4, 27), (2, 16), "int8")
    assert torch.equal(scale.flatten(), scales)
    assert torch.equal(fake_quantize(x, scale, zero_point, scheme).reshape(4, 27), values)


def test_channels_of_a_weight_are_not_flattened():
    x = torch.randn(4, 3, 2, 2)
    for flat in (False, True):
        scheme = Scheme(Dtype.int8.value, QSchemeType.per_channel, axis=1, flat=flat)
        assert dynamic_qparams(x, scheme)[0].shape == (3,)
