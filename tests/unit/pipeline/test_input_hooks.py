"""What hooks pass to observers: all rows of inputs, without padding, in pieces for convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.numerics.hadamard import hadamard
from quark.torch.pipeline.input_hooks import accumulate_inputs, watch_inputs
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.padding import padding
from quark.torch.quantization.preparation import replace_layers, select_layers

X = torch.randn(50, 8, generator=torch.Generator().manual_seed(5)) * torch.logspace(-1, 2, 8)


@pytest.fixture
def layer():
    """A quantized linear layer of 8 inputs, switched off."""
    model = nn.Sequential(nn.Linear(8, 4))
    replace_layers(model, select_layers(model, Config(scheme("int8_wo"))))
    model[0].weight_quantizer.enabled = False
    return model[0]


def seen(layer, x, mask=None):
    found = []
    with padding(mask), accumulate_inputs([(layer, found.append)]):
        layer(x)
    layer(x)  # is not looked at any more
    (tokens,) = found
    return tokens


@pytest.mark.parametrize("shape", [(50, 8), (5, 10, 8), (1, 5, 10, 8)], ids=str)
def test_all_tokens_are_seen(layer, shape):
    assert torch.equal(seen(layer, X.view(shape)), X)


@pytest.mark.parametrize("shape", [(5, 10, 8), (50, 8)], ids=["batch", "flat"])
def test_padding_is_not_seen(layer, shape):
    mask = torch.rand(5, 10, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(seen(layer, X.view(shape), mask), X[mask.flatten()])


def test_tokens_that_were_picked_are_all_seen(layer):
    mask = torch.zeros(5, 10, dtype=torch.bool)
    assert torch.equal(seen(layer, X[:30], mask), X[:30])


def test_rotated_inputs_are_seen_rotated(layer):
    layer.rotate_input(hadamard(4))
    unit = hadamard(4).float() / 2
    expected = (X.view(50, 2, 4) @ unit).view(50, 8)
    torch.testing.assert_close(seen(layer, X), expected)


def convolution(monkeypatch):
    monkeypatch.setattr("quark.torch.quantization.nn.convolution.PIECE", 200)
    model = nn.Sequential(nn.Conv2d(4, 4, 3))
    replace_layers(model, select_layers(model, Config(scheme("int8_wo"))))
    model[0].weight_quantizer.enabled = False
    return model[0]


def test_windows_of_a_convolution_are_seen_in_pieces(monkeypatch):
    layer, x, seen = convolution(monkeypatch), torch.randn(2, 4, 9, 8), []
    mask = torch.zeros(2, 4, dtype=torch.bool)  # of other tokens: shapes fit by chance
    with padding(mask), accumulate_inputs([(layer, seen.append)]):
        layer(input=x)
    expected = F.unfold(x, 3).transpose(1, 2).flatten(0, 1)
    assert len(seen) > 1 and torch.equal(torch.cat(seen), expected)


def test_a_copy_keeps_what_the_model_overwrites(monkeypatch):
    layer, x, seen = convolution(monkeypatch), torch.randn(2, 4, 9, 8), []
    expected = F.unfold(x, 3).transpose(1, 2).flatten(0, 1)
    with watch_inputs([(layer, lambda rows: seen.extend([rows, rows.copy()]))]):
        layer(x)
    x.zero_()
    given, copied = (torch.cat(list(rows.pieces())) for rows in seen)
    assert not given.any() and torch.equal(copied, expected)
