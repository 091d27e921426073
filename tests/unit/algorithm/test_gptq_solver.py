"""The mathematics of GPTQ, against its definition."""

from itertools import pairwise

import pytest
import torch

from quark.torch.algorithm import gptq_solver
from quark.torch.algorithm.gptq_solver import (
    Inputs,
    descend_columns,
    descent_factor,
    inverse_factor,
    round_columns,
)

INPUTS, OUTPUTS, TOKENS = 128, 24, 512
DAMPING = 0.01


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def correlated(tokens=TOKENS, inputs=INPUTS):
    """Inputs that depend on each other, of which some are much larger than others."""
    mix = torch.randn(inputs, inputs, generator=generator(1)) / inputs**0.5
    x = torch.randn(tokens, inputs, generator=generator(2)) @ (torch.eye(inputs) + mix)
    return x * torch.logspace(-1, 1, inputs)[torch.randperm(inputs, generator=generator(3))]


def quarters(x, column):
    return (x * 4).round() / 4


def problem(inputs=INPUTS, dtype=torch.float64):
    """A weight, a Hessian, and the Hessian with damping."""
    weight = torch.randn(OUTPUTS, inputs, generator=generator(), dtype=dtype)
    x = correlated(inputs=inputs).to(dtype)
    hessian = x.T @ x / len(x)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(inputs, dtype=dtype)
    return weight, hessian, damped


def test_the_factor_is_that_of_the_damped_inverse():
    _, hessian, damped = problem()
    upper = inverse_factor(hessian, DAMPING)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.T @ upper @ damped, torch.eye(INPUTS, dtype=torch.float64))


def test_each_column_makes_up_for_those_before_as_well_as_it_can():
    """Given the columns that are rounded, the others are those of least squares."""
    weight, hessian, damped = problem()
    shown = []

    def watch(x, column):
        shown.append(x.clone())
        return quarters(x, column)

    found, _ = round_columns(weight, inverse_factor(hessian, DAMPING), torch.arange(INPUTS), watch)
    for column in range(1, INPUTS):
        lost = (weight - found)[:, :column]
        rest = torch.linalg.solve(damped[column:, column:], damped[column:, :column] @ lost.T)
        torch.testing.assert_close(shown[column], weight[:, column] + rest[0])


@pytest.mark.parametrize("leaf", [1, 5, 1000])
@pytest.mark.parametrize("inputs", [7, 64, 100])
def test_halving_changes_nothing(leaf, inputs, monkeypatch):
    weight, hessian, _ = problem(inputs)
    given = weight, inverse_factor(hessian, DAMPING), torch.arange(inputs), quarters
    expected = round_columns(*given)
    monkeypatch.setattr(gptq_solver, "LEAF", leaf)
    for found, wanted in zip(round_columns(*given), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_rows_do_not_depend_on_each_other():
    weight, hessian, _ = problem()
    upper, order = inverse_factor(hessian, DAMPING), torch.arange(INPUTS)
    turned = torch.randperm(OUTPUTS, generator=generator(5))
    found, _ = round_columns(weight[turned], upper, order, quarters)
    torch.testing.assert_close(found, round_columns(weight, upper, order, quarters)[0][turned])


def test_an_order_is_that_of_turned_columns():
    weight, hessian, _ = problem()
    order = torch.randperm(INPUTS, generator=generator(5))
    upper = inverse_factor(hessian[order][:, order], DAMPING)
    found, errors = round_columns(weight, upper, order, quarters)
    turned, turned_errors = round_columns(weight[:, order], upper, torch.arange(INPUTS), quarters)
    assert torch.equal(found[:, order], turned) and torch.equal(errors[:, order], turned_errors)


# ---- coordinate descent -------------------------------------------------------------------------


def swept(values, weight, hessian, order, rounding=quarters):
    inputs = Inputs(hessian, torch.empty(0), order)  # a sweep takes no inverse factor
    return descend_columns(values, weight, inputs, descent_factor(inputs), rounding)


def loss(values, weight, hessian):
    lost = values - weight
    return float(((lost @ hessian) * lost).sum())


@pytest.mark.parametrize("inputs", [5, 16, 40, INPUTS])
def test_a_sweep_changes_each_column_to_what_is_best_for_it(inputs):
    """Beside a loop over single weights, which tries the codes around each."""
    weight, _, damped = problem(inputs)
    order = torch.randperm(inputs, generator=generator(5))
    start = quarters(weight, 0)
    expected = start.clone()
    for column in order.tolist():
        for row in range(OUTPUTS):
            tried = expected[row].repeat(81, 1)
            tried[:, column] += torch.arange(-40, 41) / 4
            lost = tried - weight[row]
            expected[row] = tried[((lost @ damped) * lost).sum(1).argmin()]
    found = swept(start, weight, damped, order)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert loss(found, weight, damped) < loss(start, weight, damped)


def test_sweeps_improve_what_columns_made_up_for_and_come_to_an_end():
    weight, hessian, damped = problem()
    order = torch.argsort(damped.diagonal(), descending=True)
    factor = inverse_factor(hessian[order][:, order].clone(), DAMPING)
    values, _ = round_columns(weight, factor, order, quarters)
    losses = [loss(values, weight, damped)]
    for _ in range(50):
        values = swept(values, weight, damped, order)
        losses.append(loss(values, weight, damped))
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[1] < losses[0] and losses[-1] == losses[-2]


def test_a_sweep_keeps_zeros_that_the_rounding_keeps():
    weight, _, damped = problem()
    zeros = torch.rand(weight.shape, generator=generator(6)) < 0.5

    def keeping(x, column):
        return quarters(x, column).masked_fill(zeros[:, column], 0.0)

    start = quarters(weight, 0).masked_fill(zeros, 0.0)
    found = swept(start, weight, damped, torch.arange(INPUTS), keeping)
    assert not found[zeros].any() and loss(found, weight, damped) < loss(start, weight, damped)
