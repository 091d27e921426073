"""Losses of whole models from the sums of losses of their layers, by a few measured mixtures.

The sum over layers ranks mixtures, and departs from their loss: large losses of many layers
saturate together, and sensitivities that were measured under two bits are too low for small errors.
Both depend on the size of the loss more than on the choice of layers. So a few mixtures of all
sizes are measured, and the losses of others lie on power laws between these::

    sum over layers    1.63    0.18    0.022    0.00033
    measured           1.07    0.16    0.025    0.00075

    The power law through the second and the third gives 0.093 for a sum of 0.097.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quark.torch.search.mixtures import Mixture

MIXTURES = 6  # that are measured
WINDOWS = 4  # of the text that they are measured on
POSITIONS = 256  # of each of these windows, at which predictions are compared


class LossCurve:
    """Measured losses as a function of sums of losses of layers.

    Between two measured mixtures it is the power law through both. Beyond them, the ratio of both
    losses is that of the nearest. Without any, losses are the sums.

    Args:
        measured: Sum and measured loss of mixtures, in nats per token. Pairs that are not above 0
            have no logarithm, and are left out.
    """

    def __init__(self, measured: Iterable[tuple[float, float]] = ()) -> None:
        pairs = {total: loss for total, loss in measured if total > 0 and loss > 0}
        self.points = [(math.log(total), math.log(pairs[total])) for total in sorted(pairs)]

    def __call__(self, total: float) -> float:
        """Return the loss of a mixture, given the sum of the losses of its layers."""
        if total <= 0 or not self.points:
            return total
        x = math.log(total)
        place = bisect(self.points, (x, math.inf))
        if place in (0, len(self.points)):
            x0, y0 = self.points[0 if place == 0 else -1]
            return math.exp(y0 + x - x0)
        (x0, y0), (x1, y1) = self.points[place - 1 : place + 1]
        return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def curve_windows(windows: torch.Tensor) -> torch.Tensor:
    """Return the windows that mixtures are measured on for a curve, spread over a text.

    Args:
        windows: Token identifiers of the text, (windows, length).
    """
    return windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]


def measure_curve(
    mixture: Mixture,
    measure: Callable[[Mapping[str, str]], float],
    known: tuple[float, float] | None = None,
) -> LossCurve:
    """Return the curve through measured mixtures, from the smallest to the one with least loss.

    Args:
        mixture: The best mixtures of all sizes.
        measure: Returns the loss of a mixture, given the format of each layer, in nats per token.
        known: Sum and loss of a mixture that was measured before, in place of the nearest one
            between the ends.
    """
    chosen = [mixture.choose(bits) for bits in _spread(mixture.points(), MIXTURES)]
    totals = [mixture.cost(formats)[1] for formats in chosen]
    places = list(range(len(chosen)))
    if known is not None and min(known) > 0 and len(places) > 2:
        own = math.log(known[0])
        places.remove(min(places[1:-1], key=lambda place: abs(math.log(totals[place]) - own)))
    pairs = [(totals[place], measure(chosen[place])) for place in places]
    return LossCurve(pairs if known is None else [*pairs, known])


def _spread(points: Iterable[tuple[float, float]], count: int) -> list[float]:
    """Return sizes whose losses are spread evenly on a logarithmic axis, both ends among them.

    Args:
        points: Size and loss; losses of 0 are left out.
        count: Maximum number of sizes.
    """
    positive = [(bits, math.log(loss)) for bits, loss in points if loss > 0]
    if not positive:
        return []
    logs = [log for _, log in positive]
    step = (max(logs) - min(logs)) / (count - 1)

    def nearest(place: float) -> float:
        return min(positive, key=lambda point: abs(point[1] - place))[0]

    return list(dict.fromkeys(nearest(min(logs) + step * number) for number in range(count)))
