"""Ranges of numbers in options, as annotations: ``alpha: Fraction`` lies between 0 and 1.

``value_types`` checks them together with the types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """Range of a number. A bound of None does not limit it; every number is finite.

    Attributes:
        least: Smallest value.
        above: Number below all values.
        most: Largest value.
        below: Number above all values.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        """Return what a number must be, or None if it lies in the range."""
        if not abs(value) < math.inf:
            return "finite"
        is_inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return None if is_inside else self._text()

    def _text(self) -> str:
        if self.least is not None and self.most is not None:
            return f"between {self.least:g} and {self.most:g}"
        given = {
            "at least": self.least,
            "above": self.above,
            "at most": self.most,
            "below": self.below,
        }
        return " and ".join(f"{word} {n:g}" for word, n in given.items() if n is not None)


Count = Annotated[int, Bounds(least=1)]
Natural = Annotated[int, Bounds(least=0)]
Fraction = Annotated[float, Bounds(least=0, most=1)]
InnerFraction = Annotated[float, Bounds(above=0, below=1)]
NonNegative = Annotated[float, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Divisor = Annotated[float, Bounds(least=1)]
