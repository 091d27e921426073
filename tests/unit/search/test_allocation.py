"""The best choices under a budget, against trying them all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.torch.search import allocation
from quark.torch.search.allocation import Frontier

# Sums of eighths are exact, so that equal losses are equal in any order of addition.
CHOICE = st.tuples(st.integers(1, 40), st.integers(0, 1000).map(lambda n: n / 8))
PROBLEMS = st.lists(st.lists(CHOICE, min_size=1, max_size=4), min_size=1, max_size=5)


def parts(problem):
    return [[size for size, _ in row] for row in problem], [
        [loss for _, loss in r] for r in problem
    ]


def tried(problem):
    """(size, loss) of every combination."""
    return [
        (sum(size for size, _ in chosen), sum(loss for _, loss in chosen))
        for chosen in itertools.product(*problem)
    ]


def cost(problem, chosen):
    pairs = [row[index] for row, index in zip(problem, chosen, strict=True)]
    return sum(size for size, _ in pairs), sum(loss for _, loss in pairs)


@settings(max_examples=150, deadline=None)
@given(PROBLEMS, st.integers(0, 60))
def test_nothing_within_the_budget_is_better(problem, more):
    frontier = Frontier(*parts(problem))
    assert frontier.least == min(size for size, _ in tried(problem))
    size, loss = cost(problem, frontier.choose(frontier.least + more))
    assert size <= frontier.least + more
    best = min(other for used, other in tried(problem) if used <= frontier.least + more)
    assert loss == pytest.approx(best)


@settings(max_examples=100, deadline=None)
@given(PROBLEMS)
def test_points_are_what_no_combination_beats(problem):
    combinations = tried(problem)
    expected = {}
    for size, loss in sorted(combinations):
        if not expected or loss < min(expected.values()) - 1e-9:
            expected[size] = loss
    found = Frontier(*parts(problem)).points()
    assert [size for size, _ in found] == list(expected)
    assert [loss for _, loss in found] == pytest.approx(list(expected.values()))


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="a budget of 7 is less than the least, 8"):
        Frontier([[5, 9], [3]], [[1.0, 0.0], [0.0]]).choose(7)


def test_coarse_steps_never_exceed_the_budget(monkeypatch):
    """With few steps the best may be missed, by no more than a step for each unit."""
    sizes = [[101, 211, 307], [97, 199, 401], [53, 103, 409], [89, 113, 127]]
    losses = [[9.0, 4.0, 1.0], [8.0, 5.0, 2.0], [7.0, 3.0, 0.5], [2.0, 1.5, 1.0]]
    exact = Frontier(sizes, losses)
    monkeypatch.setattr(allocation, "STEPS", 64)
    coarse = Frontier(sizes, losses)
    problem = [list(zip(*row, strict=True)) for row in zip(sizes, losses, strict=True)]
    step = -(-sum(max(row) - min(row) for row in sizes) // 64)
    for budget in range(exact.least, 1300, 50):
        size, loss = cost(problem, coarse.choose(budget))
        assert size <= budget
        tighter = budget - step * len(sizes)
        if tighter >= exact.least:
            assert loss <= cost(problem, exact.choose(tighter))[1]
