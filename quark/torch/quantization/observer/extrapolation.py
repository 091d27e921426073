"""An observer that widens ranges of few values by what the next values may exceed them.

A range of minimum and maximum holds the values of the calibration. Of n values, the next one is
outside with probability 2 / (n + 1), and a value outside is cut. Networks return few values: 64
pictures and two classes give 128. Inside of networks there are so many that this does not count.
"""

from __future__ import annotations

import math

import torch

from quark.torch.quantization.observer.histogram import BINS, HistogramObserver

TAIL = 16  # values of a tail, at most
SHARE = 8  # a tail has at most one value in so many
ROUNDS = 32  # of the fixed point


def extension(excess: float, share: float, reach: float, width: float, steps: float) -> float:
    """Return by how much to widen one end of a range, so that the expected error is the least.

    Values beyond a threshold u exceed it by exponential amounts with the mean β, as in the method
    of peaks over thresholds (Pickands 1975; Davison and Smith 1990) with shape 0. With a share p of
    all values beyond u, a limit t after u, and a range of width w in S steps, the expected squared
    error of cutting and rounding is

        2 p β² exp(-t / β) + w² / (12 S²).

    Both t and w grow by e. The error is least where 12 S² p β exp(-t / β) = w, or at e = 0.

    Example: excess 1, share 0.1, reach 3, width 10, 255 steps. ln(12 · 255² · 0.1 / (10 + e)) - 3
    is e = 5.5, so the width grows to 15.5.

    Args:
        excess: β, the mean excess over the threshold.
        share: p, the share of the values beyond it.
        reach: t, the distance from the threshold to the end of the range.
        width: w, the width of the range.
        steps: S, the number of steps.
    """
    if excess <= 0 or share <= 0:
        return 0.0
    more = 0.0
    for _ in range(ROUNDS):  # converges: its slope is -excess / (width + more)
        ratio = 12 * steps**2 * share * excess / (width + more)
        more = max(0.0, excess * math.log(ratio) - reach) / 2 + more / 2
    return more


class PerTensorExtrapolatedMinMaxObserver(HistogramObserver):
    """Minimum and maximum, each widened by ``extension``; for integers.

    The tail of an end is the ``TAIL`` values next to it, or one value in ``SHARE`` if that is less.
    An end that many values share, such as 0 after a ReLU, has no tail, and stays. So does an end
    where cutting costs less than wider steps: that of hundreds of thousands of values.
    """

    is_for_integers = True

    def clipped(self) -> tuple[float, float]:
        """Return the widened range."""
        counts = self.counts.cpu()
        fmt = self.scheme.fmt
        steps = fmt.qmax - fmt.qmin
        lo, hi = min(self.lo, 0.0), max(self.hi, 0.0)
        width = 2 * max(-lo, hi) if self.scheme.symmetric else hi - lo
        more = [
            extension(*_tail(ordered, self.limit / BINS, end), width, steps)
            for ordered, end in ((counts.flip(0), self.hi), (counts, -self.lo))
        ]
        return self.lo - more[1], self.hi + more[0]


def _tail(counts: torch.Tensor, bin_width: float, end: float) -> tuple[float, float, float]:
    """Return mean excess, share and reach of a tail; see ``extension``.

    Args:
        counts: Counts of the bins, from the end of the range inward.
        bin_width: Width of a bin.
        end: Largest value, or the smallest one with its sign changed.
    """
    total = int(counts.sum())
    wanted = min(TAIL, total // SHARE)
    cumulated = counts.cumsum(0)
    last = int(torch.searchsorted(cumulated, wanted))
    first = int((counts > 0).int().argmax())
    if wanted < 2 or last == first:
        return 0.0, 0.0, 0.0
    used = torch.arange(first, last + 1, device="cpu")
    threshold = (BINS - last - 1) * bin_width
    values = ((BINS - used) * bin_width - bin_width / 2).clamp(max=end)
    amount = counts[first : last + 1].double()
    count = float(amount.sum())
    excess = float((amount * (values - threshold)).sum()) / count
    return excess, count / total, end - threshold
