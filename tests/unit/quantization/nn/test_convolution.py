"""Windows times the matrix of a weight are the convolution of torch, whatever its geometry."""

import itertools

import pytest
import torch
from torch import nn

from quark.torch.quantization.nn import convolution
from quark.torch.quantization.nn.convolution import (
    TRANSPOSED,
    convolution_matrix,
    convolution_weight,
    iterate_windows,
)

SIZES = (9, 8, 7)
WHOLE = convolution.PIECE
KINDS = [
    *itertools.product((nn.Conv1d, nn.Conv2d), (1, 2, 6), (1, 2), (1, 2), (0, 1, "same"), (1, 3)),
    *itertools.product((nn.Conv3d,), (1, 3), (1, 2), (1,), (1,), (2,)),
]


def check(layer, x, **options):
    kind = isinstance(layer, TRANSPOSED)
    matrix = convolution_matrix(layer.weight, layer.groups, kind)
    again = convolution_weight(matrix, layer.weight.shape, layer.groups, kind)
    assert torch.equal(again, layer.weight)
    pieces = list(iterate_windows(layer, x, **options))
    windows = torch.cat(pieces, -2).view(layer.groups, -1, matrix.shape[1])
    rows = matrix.view(layer.groups, -1, matrix.shape[1])
    found = torch.einsum("gtn,gon->tgo", windows, rows).flatten(1)
    expected = layer(x, **options).movedim(-layer.weight.dim() + 1, -1).flatten(0, -2)
    torch.testing.assert_close(found + layer.bias, expected, rtol=1e-4, atol=1e-5)
    return pieces


@pytest.mark.parametrize("piece", [WHOLE, 100], ids=["whole", "pieces"])
def test_convolutions(piece, monkeypatch):
    monkeypatch.setattr(convolution, "PIECE", piece)
    for kind, groups, stride, dilation, padding, kernel in KINDS:
        if padding == "same" and stride > 1:
            continue
        layer = kind(6, 12, kernel, stride, padding, dilation, groups)
        axes = len(layer.kernel_size)
        pieces = check(layer, torch.randn(3, 6, *SIZES[:axes]))
        assert len(pieces) == 1 or piece < WHOLE
        assert pieces[0].dim() == 2 + (groups > 1)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [2, "same"])
def test_padding_modes(mode, padding):
    check(nn.Conv2d(4, 6, (4, 3), padding=padding, padding_mode=mode), torch.randn(2, 4, 9, 8))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_transposed_convolutions(groups, monkeypatch):
    monkeypatch.setattr(convolution, "PIECE", 300)
    shapes = itertools.product((1, 2, 3), (1, 2), (0, 1, 2), (2, 3))
    for stride, dilation, padding, kernel in shapes:
        options = {"stride": (stride, 2), "dilation": dilation, "padding": (padding, 0)}
        layer = nn.ConvTranspose2d(
            6, 12, (kernel, 3), output_padding=(0, 1), groups=groups, **options
        )
        check(layer, torch.randn(2, 6, 5, 4))


def test_an_output_size():
    layer, x = nn.ConvTranspose2d(4, 6, 3, stride=3), torch.randn(2, 4, 5, 4)
    check(layer, x)
    check(layer, x, output_size=(17, 13))


def test_one_image_alone_and_channels_last():
    layer = nn.Conv2d(4, 6, 3, (2, 1))
    check(layer, torch.randn(4, 9, 8))
    check(layer, torch.randn(2, 4, 9, 8).to(memory_format=torch.channels_last))


def test_pieces_bound_the_memory(monkeypatch):
    monkeypatch.setattr(convolution, "PIECE", 5000)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    sizes = [piece.numel() for piece in check(layer, torch.randn(2, 4, 32, 32))]
    assert max(sizes) <= 5000 and sum(sizes) == 2 * 32 * 32 * 36
