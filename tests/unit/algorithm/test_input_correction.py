"""Corrected weights, against least squares on the data itself."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm.input_correction import DAMPING, correct_weight_
from quark.torch.pipeline.accumulators import Gram
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import replace_layers, select_layers

INPUTS, OUTPUTS, TOKENS = 32, 8, 400


def layer_and_data(kind=nn.Linear):
    """A layer, inputs of the float model, and what became of them."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS) if kind is nn.Linear else Conv1D(OUTPUTS, INPUTS)
    nn.init.normal_(linear.weight.detach(), generator=generator)
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(scheme("int4_wo_32"))))
    mix = torch.randn(INPUTS, INPUTS, generator=generator) / INPUTS**0.5
    r = torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    x = r + 0.3 * torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    return model[0], r, x


def rows_of(layer):
    return (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).detach().clone()


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_weight_goes_towards_least_squares(kind, share):
    layer, r, x = layer_and_data(kind)
    before, gram = rows_of(layer), Gram()
    gram(x)
    correct_weight_(layer, gram, (r - x).T @ x, share)
    # Damping is a few more tokens, at which the corrected weight shall be what the weight was.
    ridge = (DAMPING * gram.total.diagonal().mean()).sqrt() * torch.eye(INPUTS)
    inputs = torch.cat([x, ridge])
    wanted = torch.cat([r @ before.T, ridge @ before.T])
    best = torch.linalg.lstsq(inputs, wanted).solution.T
    torch.testing.assert_close(
        rows_of(layer), before + share * (best - before), rtol=1e-3, atol=1e-4
    )


def test_inputs_that_stayed_ask_for_nothing():
    layer, r, _ = layer_and_data()
    before, gram = rows_of(layer), Gram()
    gram(r)
    correct_weight_(layer, gram, torch.zeros(INPUTS, INPUTS))
    assert torch.equal(rows_of(layer), before)


def test_inputs_that_are_always_zero():
    layer, _, _ = layer_and_data()
    before, gram = rows_of(layer), Gram()
    gram(torch.zeros(4, INPUTS))
    correct_weight_(layer, gram, torch.zeros(INPUTS, INPUTS))
    assert torch.equal(rows_of(layer), before)
