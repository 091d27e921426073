"""Corrected weights, against least squares on the data itself."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quark.torch.algorithm.input_correction import DAMPING, correct_weights_
from quark.torch.algorithm.layer_inputs import Comparison
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.preparation import replace_layers, select_layers

INPUTS, OUTPUTS, TOKENS = 32, 8, 400


def layer_and_data(kind=nn.Linear, name="int4_wo_32"):
    """A layer, inputs of the float model, and what became of them."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS) if kind is nn.Linear else Conv1D(OUTPUTS, INPUTS)
    nn.init.normal_(linear.weight.detach(), generator=generator)
    model = nn.Sequential(linear)
    replace_layers(model, select_layers(model, Config(scheme(name))))
    mix = torch.randn(INPUTS, INPUTS, generator=generator) / INPUTS**0.5
    r = torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    x = r + 0.3 * torch.randn(TOKENS, INPUTS, generator=generator) @ mix
    return model[0], r, x


def rows_of(layer):
    return (layer.weight.T if isinstance(layer, Conv1D) else layer.weight).detach().clone()


def compare(r, x):
    return Comparison(x.T @ x, (r - x).T @ x)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D], ids=["rows", "transposed"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_weight_goes_towards_least_squares(kind, share):
    layer, r, x = layer_and_data(kind)
    before = rows_of(layer)
    correct_weights_([layer], [compare(r, x)] * 2, share)
    # Damping is a few more tokens, at which the corrected weight shall be what the weight was.
    ridge = (DAMPING * (x * x).sum(0).mean()).sqrt() * torch.eye(INPUTS)
    inputs = torch.cat([x, ridge])
    wanted = torch.cat([r @ before.T, ridge @ before.T])
    best = torch.linalg.lstsq(inputs, wanted).solution.T
    torch.testing.assert_close(
        rows_of(layer), before + share * (best - before), rtol=1e-3, atol=1e-4
    )


def damped_least_squares(r, x, before):
    ridge = (DAMPING * (x * x).sum(0).mean()).sqrt() * torch.eye(INPUTS)
    wanted = torch.cat([r @ before.T, ridge @ before.T])
    return torch.linalg.lstsq(torch.cat([x, ridge]), wanted).solution.T


def test_the_share_is_the_one_that_fits_data_not_seen_best():
    """With few tokens the correction fits their noise: a part of it is best on other tokens."""
    layer, r, x = layer_and_data()
    before = rows_of(layer)
    folds = [(r[:100], x[:100]), (r[100:200], x[100:200])]
    correct_weights_([layer], [compare(*fold) for fold in folds])
    full = damped_least_squares(r[:200], x[:200], before) - before
    moved = rows_of(layer) - before
    share = float((moved * full).sum() / full.square().sum())
    torch.testing.assert_close(moved, share * full, rtol=1e-2, atol=1e-3)

    def held_out_error(beta):
        errors = 0.0
        for (r0, x0), (r1, x1) in (folds, folds[::-1]):
            change = damped_least_squares(r0, x0, before) - before
            errors += float((r1 @ before.T - x1 @ (before + beta * change).T).square().sum())
        return errors

    grid = torch.linspace(0, 1, 1001).tolist()
    best = min(grid, key=held_out_error)
    assert 0.1 < best < 0.9
    assert share == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize(("name", "least", "most"), [("mxfp4", 0, 0.01), ("int4_wo_32", 0.1, 1)])
def test_directions_with_little_energy_are_left_alone_where_inputs_are_rounded(name, least, most):
    """The noise of rounding is there too; other texts may have their energy there."""
    layer, _, _ = layer_and_data(name=name)
    r = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(2))
    r[:, INPUTS // 2 :] /= 32  # a thousandth of the energy
    before = rows_of(layer)
    correct_weights_([layer], [compare(r[::2], r[::2] / 2), compare(r[1::2], r[1::2] / 2)])
    moved = ((rows_of(layer) - before).abs() / before.abs()).split(INPUTS // 2, dim=1)
    assert moved[0].median() > 0.5  # of the 1 that undoes x = r / 2
    assert least <= moved[1].median() <= most


def test_what_one_part_of_the_data_alone_suggests_is_not_followed():
    layer, r, x = layer_and_data()
    before = rows_of(layer)
    correct_weights_([layer], [compare(r, x)])
    assert torch.equal(rows_of(layer), before)


def test_parts_that_disagree_change_nothing():
    layer, r, x = layer_and_data()
    before = rows_of(layer)
    square = x.T @ x
    cross = (r - x).T @ x
    correct_weights_([layer], [Comparison(square, cross), Comparison(square, -cross)])
    assert torch.equal(rows_of(layer), before)


def test_layers_that_share_an_input_have_their_own_shares():
    first, r, x = layer_and_data()
    second, _, _ = layer_and_data()
    torch.nn.init.normal_(second.weight, generator=torch.Generator().manual_seed(5))
    folds = [compare(r[:40], x[:40]), compare(r[40:80], x[40:80])]
    alone = [layer_and_data()[0], layer_and_data()[0]]
    alone[1].weight.data.copy_(second.weight)
    correct_weights_([first, second], folds)
    for layer in alone:
        correct_weights_([layer], folds)
    assert torch.equal(rows_of(first), rows_of(alone[0]))
    assert torch.equal(rows_of(second), rows_of(alone[1]))


def test_inputs_that_stayed_ask_for_nothing():
    layer, r, _ = layer_and_data()
    before = rows_of(layer)
    correct_weights_([layer], [compare(r, r)] * 2)
    assert torch.equal(rows_of(layer), before)


def test_inputs_that_are_always_zero():
    layer, _, _ = layer_and_data()
    before, zero = rows_of(layer), torch.zeros(4, INPUTS)
    correct_weights_([layer], [compare(zero, zero)] * 2)
    assert torch.equal(rows_of(layer), before)
