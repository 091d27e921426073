"""Damping chosen on data that is held back, against rounding itself."""

import pytest
import torch

from quark.torch.algorithm.damping import TRIED, choose_damping, expected_error
from quark.torch.algorithm.gptq_solver import inverse_factor, round_columns
from quark.torch.quantization.config.algo import GPTQConfig, QronosConfig, YaqaConfig
from tests.configurations import quantized_by
from tests.models.architectures import varied

INPUTS, ROWS, STEP = 48, 400, 0.05


class Grid:
    """Rounds to multiples of a step."""

    def __call__(self, x, column):
        return (x / STEP).round() * STEP

    def select_rows(self, rows):
        return self


def tokens(count, seed):
    """Inputs with a weak correlation, of which three channels are large."""
    generator = torch.Generator().manual_seed(7)
    mix = torch.eye(INPUTS) + 0.05 * torch.randn(INPUTS, INPUTS, generator=generator)
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed)) @ mix.T
    x[:, :3] *= 20
    return x


def hessian(x):
    return x.T @ x / len(x)


def by_size(h):
    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    return order, h[order][:, order]


def error_of_rounding(h, damping, judge):
    """The squared error of the outputs for other inputs, by a weight that is rounded."""
    weight = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(3))
    order, ordered = by_size(h)
    factor = inverse_factor(ordered.clone(), damping)
    lost = (weight - round_columns(weight, factor, order, Grid())[0]).double()
    return float((lost @ judge.double().T).square().sum() / len(judge))


@pytest.mark.parametrize("damping", [0.001, 0.03, 0.5])
@pytest.mark.parametrize("count", [60, 2000])
def test_the_expected_error_is_that_of_rounding(count, damping):
    fitted, judge = hessian(tokens(count, 1)), tokens(500, 2)
    order, ordered = by_size(fitted)
    expected = expected_error(ordered, hessian(judge)[order][:, order], damping)
    measured = error_of_rounding(fitted, damping, judge) / (ROWS * STEP**2 / 12)
    assert measured == pytest.approx(expected, rel=0.1)


def chosen(count, least=1e-4):
    folds = [hessian(tokens(count, seed)) for seed in (4, 5)]
    return choose_damping((folds[0] + folds[1]) / 2, *folds, least)


def test_it_loses_less_on_data_not_seen_where_there_is_little():
    h, fresh = hessian(torch.cat([tokens(40, 4), tokens(40, 5)])), tokens(4000, 6)
    best = min(error_of_rounding(h, x, fresh) for x in (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0))
    found = error_of_rounding(h, chosen(40), fresh)
    assert found < 0.9 * error_of_rounding(h, 1e-4, fresh)
    assert found < 1.1 * best


def test_more_data_asks_for_less():
    dampings = [chosen(count) for count in (30, 100, 1000, 30000)]
    assert dampings == sorted(dampings, reverse=True) and dampings[0] > dampings[-1]


@pytest.mark.parametrize("least", [0.05, 0.9])
def test_it_is_never_weaker_than_the_option(least):
    assert chosen(30000, least) == least


def test_large_channels_do_not_change_it():
    """Shares are those of the median: the mean is that of three channels."""
    h = hessian(tokens(60, 4))
    share = float(h.diagonal().median() / h.diagonal().mean())
    assert share < 0.05
    assert any(chosen(30) == pytest.approx(tried * share, rel=0.5) for tried in TRIED)


def test_a_fold_that_cannot_be_inverted_leaves_the_option():
    nothing = torch.full((4, 4), float("nan"))
    assert choose_damping(torch.eye(4), nothing, torch.eye(4), 0.02) == 0.02


DATA = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("kind", [GPTQConfig, QronosConfig, YaqaConfig])
@pytest.mark.sampled(3)
def test_it_changes_what_little_data_rounds_to(kind):
    models = [
        quantized_by(varied("llama"), "int4_wo_32", kind(choose_damping=choose), data=[DATA])
        for choose in (False, True)
    ]
    first, second = ([p for n, p in m.named_parameters() if "down" in n] for m in models)
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
