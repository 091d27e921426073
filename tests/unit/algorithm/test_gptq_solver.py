"""The mathematics of GPTQ, against its definition."""

import pytest
import torch

from quark.torch.algorithm import gptq_solver
from quark.torch.algorithm.gptq_solver import inverse_factor, round_columns

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
