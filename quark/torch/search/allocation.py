"""Choose one option per unit so that the sum of losses is least, for all budgets at once.

This is the multiple-choice knapsack problem, solved by dynamic programming over the size. The
result is exact if the sizes have a large enough common divisor, as layers of similar shapes do.
Otherwise sizes are rounded up to multiples of a 2¹⁷th of their span, and the budget still holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

STEPS = 1 << 17  # maximum number of distinct sizes


class Frontier:
    """The best choices for every budget.

    Args:
        sizes: Size of each option of each unit.
        losses: Loss of each option of each unit, not negative.

    Attributes:
        least: Sum of the smallest sizes.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> None:
        self.sizes, self.losses = sizes, losses
        self.least = sum(min(row) for row in sizes)
        added = [[size - min(row) for size in row] for row in sizes]
        span = sum(max(row) for row in added)
        self._step = math.gcd(*(size for row in added for size in row)) or 1
        if span // self._step > STEPS:
            self._step = math.ceil(span / STEPS)
        # Rounded up, so that the choice fits the budget.
        self._steps = [[-(-size // self._step) for size in row] for row in added]
        self._solve(sum(max(row) for row in self._steps))

    def _solve(self, largest: int) -> None:
        """Compute the least loss, and the choice of each unit, for each budget in steps.

        Args:
            largest: Largest useful budget, in steps above the least size.
        """
        # best[b] is the least loss of the units so far with b steps. With one more unit it is the
        # minimum over its options of best[b - steps] + loss.
        # Example: options of 0, 1, 3 steps with losses 9, 4, 0, and best = (8, 5, 5, 5):
        #   0 steps: 17 14 14 14
        #   1 step:   -  12  9  9
        #   3 steps:  -   -  -  8  ->  best = (17, 12, 9, 8), choices (0, 1, 1, 2)
        best = torch.zeros(largest + 1, dtype=torch.float64, device="cpu")
        choices = []
        for steps, losses in zip(self._steps, self.losses, strict=True):
            options = torch.full(
                (len(steps), largest + 1), torch.inf, dtype=torch.float64, device="cpu"
            )
            for row, step, loss in zip(options, steps, losses, strict=True):
                row[step:] = best[: largest + 1 - step] + loss
            best, choice = options.min(0)
            choices.append(choice.to(torch.int16))
        self._best, self._choices = best, choices

    def choose(self, budget: float) -> list[int]:
        """Return the index of the option of each unit with the least total loss within a budget.

        Raises:
            ValueError: Even the smallest options exceed the budget.
        """
        if budget < self.least:
            raise ValueError(f"a budget of {budget:.0f} is less than the least, {self.least}.")
        left = min(int((budget - self.least) // self._step), len(self._best) - 1)
        chosen = []
        for steps, choice in zip(reversed(self._steps), reversed(self._choices), strict=True):
            chosen.append(int(choice[left]))
            left -= steps[chosen[-1]]
        return chosen[::-1]

    def points(self) -> list[tuple[int, float]]:
        """Return (size, loss) of each budget that allows a smaller loss than all lower budgets."""
        falls = torch.cat(
            [torch.ones(1, dtype=torch.bool, device="cpu"), self._best[1:] < self._best[:-1]]
        )
        steps = falls.nonzero().flatten().tolist()
        return [(self.least + step * self._step, float(self._best[step])) for step in steps]
