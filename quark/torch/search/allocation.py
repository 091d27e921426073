"""One of several choices for each unit, so that losses add up to the least under any budget.

The multiple-choice knapsack, solved by dynamic programming over the size: exact where sizes have a
common divisor that is not too small (layers of like shapes do), and else to a 2¹⁷th of the span of
sizes, never above the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

STEPS = 1 << 17  # sizes that are told apart, at most


class Frontier:
    """The best choices under every budget.

    Args:
        sizes: Size of each choice of each unit.
        losses: Loss of each choice of each unit, not negative.

    Attributes:
        least: Size of the smallest choices together.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> None:
        self.sizes, self.losses = sizes, losses
        self.least = sum(min(row) for row in sizes)
        added = [[size - min(row) for size in row] for row in sizes]
        span = sum(max(row) for row in added)
        self._step = math.gcd(*(size for row in added for size in row)) or 1
        if span // self._step > STEPS:
            self._step = math.ceil(span / STEPS)
        # Rounded up, so that what is chosen fits.
        self._steps = [[-(-size // self._step) for size in row] for row in added]
        self._solve(sum(max(row) for row in self._steps))

    def _solve(self, most: int) -> None:
        best = torch.zeros(most + 1, dtype=torch.float64)  # loss of the units so far, by budget
        taken = []
        for steps, losses in zip(self._steps, self.losses, strict=True):
            options = torch.full((len(steps), most + 1), torch.inf, dtype=torch.float64)
            for row, step, loss in zip(options, steps, losses, strict=True):
                row[step:] = best[: most + 1 - step] + loss
            best, choice = options.min(0)
            taken.append(choice.to(torch.int16))
        self._best, self._taken = best, taken

    def choose(self, budget: float) -> list[int]:
        """Return the choice of each unit that loses least within a budget.

        Raises:
            ValueError: Even the smallest choices exceed it.
        """
        if budget < self.least:
            raise ValueError(f"a budget of {budget:.0f} is less than the least, {self.least}.")
        left = min(int((budget - self.least) // self._step), len(self._best) - 1)
        chosen = []
        for steps, taken in zip(reversed(self._steps), reversed(self._taken), strict=True):
            chosen.append(int(taken[left]))
            left -= steps[chosen[-1]]
        return chosen[::-1]

    def points(self) -> list[tuple[int, float]]:
        """Return the budgets at which less can be lost than below, with that loss."""
        falls = torch.cat([torch.ones(1, dtype=torch.bool), self._best[1:] < self._best[:-1]])
        steps = falls.nonzero().flatten().tolist()
        return [(self.least + step * self._step, float(self._best[step])) for step in steps]
