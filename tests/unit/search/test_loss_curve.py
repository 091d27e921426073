"""Losses of whole models from sums over layers."""

import itertools
import math

import pytest
import torch

from quark.torch.search.costs import Unit
from quark.torch.search.loss_curve import MIXTURES, LossCurve, curve_windows, measure_curve
from quark.torch.search.mixtures import Mixture

MEASURED = [(1.63, 1.07), (0.18, 0.16), (0.022, 0.025), (0.00033, 0.00075)]


def test_the_example_of_the_module():
    assert LossCurve(MEASURED)(0.097) == pytest.approx(0.093, abs=0.0005)


def test_measured_mixtures_have_their_loss():
    curve = LossCurve(MEASURED)
    assert [curve(total) for total, _ in MEASURED] == pytest.approx([loss for _, loss in MEASURED])


@pytest.mark.parametrize("total", [1e-3, 0.0123, 0.7, 3.0])
def test_a_power_law_is_found(total):
    law = LossCurve((x, 0.8 * x**0.85) for x in (3.0, 1e-3, 0.1))
    assert law(total) == pytest.approx(0.8 * total**0.85)


def test_beyond_the_ends_the_ratio_stays():
    curve = LossCurve(MEASURED)
    assert curve(3.26) == pytest.approx(2.14)
    assert curve(0.000033) == pytest.approx(0.000075)


@pytest.mark.parametrize("measured", [(), [(0.0, 0.1)], [(0.1, 0.0)], [(0.1, -1e-9)]])
def test_without_measured_losses_sums_stay(measured):
    curve = LossCurve(measured)
    assert [curve(total) for total in (0.0, 0.1, 2.0)] == [0.0, 0.1, 2.0]


@pytest.fixture
def mixture():
    """Layers of one size, whose losses fall by the square of the step of a format."""
    bits = {f"int{bits}": 1000 * bits for bits in (2, 3, 4, 8)}
    losses = [
        {name: 0.01 * (1 + number) * 4.0 ** -int(name[3:]) for name in bits} for number in range(24)
    ]
    return Mixture([Unit((f"{n}",), 1000, bits, loss) for n, loss in enumerate(losses)])


def test_mixtures_from_the_smallest_to_the_largest_are_measured(mixture):
    seen = []

    def measure(chosen):
        seen.append(chosen)
        return 2 * mixture.cost(chosen)[1] ** 0.9

    curve = measure_curve(mixture, measure)
    assert seen[0] == dict.fromkeys(seen[0], "int8")
    assert seen[-1] == dict.fromkeys(seen[0], "int2")
    assert len(seen) == MIXTURES
    logs = [math.log(mixture.cost(chosen)[1]) for chosen in seen]
    steps = [b - a for a, b in itertools.pairwise(logs)]
    assert max(steps) < 1.3 * min(steps)
    for bits in (2.5, 3.3, 5.7):
        total = mixture.cost(mixture.choose(bits))[1]
        assert curve(total) == pytest.approx(2 * total**0.9)


@pytest.mark.parametrize("bits", [2.0, 2.1, 3.3, 8.0])
def test_a_known_mixture_stands_in_place_of_another(mixture, bits):
    total, seen = mixture.cost(mixture.choose(bits))[1], []

    def measure(chosen):
        seen.append(mixture.cost(chosen)[1])
        return 0.8 * seen[-1]

    curve = measure_curve(mixture, measure, (total, 0.9 * total))
    assert len(seen) == MIXTURES - 1
    assert curve(total) == pytest.approx(0.9 * total)
    assert len(curve.points) == MIXTURES - (total in seen)
    for end in (seen[0], seen[-1]):
        assert curve(end) == pytest.approx((0.9 if end == total else 0.8) * end)


def test_one_format_is_measured_once():
    only = Mixture([Unit(("layer",), 100, {"int4": 400}, {"int4": 0.1})])
    assert measure_curve(only, lambda chosen: 0.2)(0.1) == pytest.approx(0.2)


def test_formats_without_loss_are_not_measured():
    free = Mixture([Unit(("layer",), 100, {"float16": 1600}, {"float16": 0.0})])
    assert measure_curve(free, lambda chosen: pytest.fail("measured"))(0.1) == 0.1


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(2, [0, 1]), (4, [0, 1, 2, 3]), (7, [0, 1, 2, 3]), (16, [0, 4, 8, 12]), (18, [0, 4, 8, 12])],
)
def test_windows_of_the_curve_are_spread_over_the_text(count, chosen):
    windows = torch.arange(3 * count).view(count, 3)
    assert torch.equal(curve_windows(windows), windows[chosen])
