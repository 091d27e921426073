"""Observers that record a histogram and clip the range by percentile or by squared error.

Counts are int64 and the width of a bin is a power of two. Histograms therefore merge exactly and in
any order, and batches have the same histogram as their concatenation. Example: a histogram over
[-1, 1) with bins of 2^-11 meets the value 3. The limit becomes 4, and the counts of four adjacent
bins are added to one bin of 2^-9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quark.torch.numerics.qdq import CHUNK, fake_quantize
from quark.torch.numerics.scales import qparams_from_range
from quark.torch.quantization.observer.observer import HasScheme, ObserverBase
from quark.torch.quantization.observer.scale_search import widest_range

BINS = 2048  # on either side of zero
STEPS = 100  # candidate thresholds of a search, down to a fifth of the range
PERCENTILE = 99.99
SMALLEST = -100  # exponent of the smallest limit: bins of 2^-111, whose reciprocal is finite


class Histogram:
    """Histogram of a whole tensor over [-limit, limit), with its exact minimum and maximum.

    Args:
        device: Device of the counts, by default that of the tensors.

    Attributes:
        counts: int64 (2 * BINS,); the first half counts negative values.
        limit: Power of two that exceeds all magnitudes; 0 before a value other than 0.
        lo: Smallest value.
        hi: Largest value.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Clear the counts."""
        self.counts = torch.zeros(2 * BINS, dtype=torch.int64, device=self.device or "cpu")
        self.limit = 0.0
        self.lo, self.hi = math.inf, -math.inf

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return self.hi < self.lo

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of ``x``; an empty tensor changes nothing.

        Raises:
            FloatingPointError: NaN or infinity was observed.
        """
        if x.numel() == 0:
            return
        lo, hi = map(float, x.aminmax())
        if not (math.isfinite(lo) and math.isfinite(hi)):
            raise FloatingPointError("NaN or infinite values were observed.")
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
        self._grow(limit_of(self.lo, self.hi))
        if self.limit == 0.0:  # only zeros so far
            self.counts[BINS] += x.numel()
            return
        counts = self.counts.to(x.device)
        for piece in torch.split(x.reshape(-1), CHUNK):
            # Scaling by a power of two is exact, so no value changes its bin by rounding.
            index = piece.float().mul(BINS / self.limit).floor_().add_(BINS)
            index = index.clamp_(0, 2 * BINS - 1).to(torch.int32)
            counts += torch.bincount(index, minlength=2 * BINS)
        self.counts = counts.to(self.device or x.device)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        if other.is_empty:
            return
        self.lo, self.hi = min(self.lo, other.lo), max(self.hi, other.hi)
        self._grow(other.limit)
        self.counts += _coarser(other.counts, other.limit, self.limit).to(self.counts.device)

    def tensors(self) -> Sequence[torch.Tensor | None]:
        """Return the counts, and the smallest and largest value with the limit, float64 (3,)."""
        return self.counts, torch.tensor(
            [self.lo, self.hi, self.limit], dtype=torch.float64, device="cpu"
        )

    def set_tensors(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Replace the counts and the range."""
        counts, range_ = tensors
        assert counts is not None and range_ is not None
        self.counts = counts
        self.lo, self.hi, self.limit = range_.tolist()

    def _grow(self, limit: float) -> None:
        if limit <= self.limit:
            return
        self.counts = _coarser(self.counts, self.limit, limit)
        self.limit = limit

    def centers(self) -> torch.Tensor:
        """Return the middle of each bin in float32."""
        index = torch.arange(2 * BINS, dtype=torch.float32, device=self.counts.device)
        return (index - BINS + 0.5) * ((self.limit or 1.0) / BINS)


class HistogramObserver(Histogram, ObserverBase):
    """Records a histogram and computes scales from its range, or from a part of it."""

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        ObserverBase.__init__(self, qspec, device)
        self.reset()

    def clipped(self) -> tuple[float, float]:
        """Return the range to quantize: the observed range, unless a subclass clips it."""
        return self.lo, self.hi

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale and zero point of the range to quantize.

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.is_empty:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        lo, hi = self.clipped()
        device = self.counts.device
        return qparams_from_range(
            torch.tensor(lo, dtype=torch.float32, device=device),
            torch.tensor(hi, dtype=torch.float32, device=device),
            self.scheme,
            largest=self.largest,
        )


def limit_of(lo: float, hi: float) -> float:
    """Return the limit of a histogram of values from ``lo`` to ``hi``; 0 for zeros only."""
    amax = max(-lo, hi)
    return 2.0 ** max(math.frexp(amax)[1], SMALLEST) if amax > 0 else 0.0


def _coarser(counts: torch.Tensor, limit: float, wider: float) -> torch.Tensor:
    """Return counts over [-wider, wider), by adding adjacent bins."""
    if limit in (0.0, wider):
        return counts
    ratio = round(wider / limit)
    halves = counts.reshape(2, BINS)
    if ratio >= BINS:
        merged = torch.zeros_like(halves)
        merged[0, -1], merged[1, 0] = halves[0].sum(), halves[1].sum()
        return merged.reshape(-1)
    merged = torch.zeros_like(halves)
    sums = halves.reshape(2, BINS // ratio, ratio).sum(-1)
    merged[0, BINS - BINS // ratio :] = sums[0]
    merged[1, : BINS // ratio] = sums[1]
    return merged.reshape(-1)


class PerTensorPercentileObserver(HistogramObserver):
    """Clips the range to a percentage of the values.

    Symmetric ranges clip the largest magnitudes. Other ranges clip half of the excess at each end.

    Args:
        qspec: Specification of the tensor.
        device: Device of the statistics.
        percentile: Percentage of the values inside the range; 100 for the minimum and maximum.
    """

    def __init__(
        self,
        qspec: HasScheme,
        device: torch.device | None = None,
        percentile: float = PERCENTILE,
    ) -> None:
        if not 0 < percentile <= 100:
            raise ValueError(f"percentile={percentile}: give a number above 0 and up to 100.")
        super().__init__(qspec, device)
        self.percentile = percentile

    def clipped(self) -> tuple[float, float]:
        """Return the range at the percentile."""
        inside = self.percentile / 100
        if self.scheme.symmetric:
            halves = self.counts.reshape(2, BINS)
            magnitude = self._quantile(halves[0].flip(0) + halves[1], inside, 0.0)
            return -min(magnitude, -self.lo), min(magnitude, self.hi)
        tail = (1 - inside) / 2
        lo = self._quantile(self.counts, tail, -self.limit)
        hi = self._quantile(self.counts, 1 - tail, -self.limit)
        return max(lo, self.lo), min(hi, self.hi)

    def _quantile(self, counts: torch.Tensor, share: float, start: float) -> float:
        """Return the value below which a share of the counts lies, by interpolation in a bin."""
        total = counts.double().cumsum(0)
        target = share * float(total[-1])
        index = int(torch.searchsorted(total, target).clamp(max=len(counts) - 1))
        before = float(total[index - 1]) if index else 0.0
        inside = (target - before) / max(1.0, float(counts[index]))
        return start + (index + inside) * self.limit / BINS


class PerTensorMSEObserver(HistogramObserver):
    """Clips the range to minimize the squared error of quantization.

    Symmetric ranges search ``STEPS`` thresholds, and the one that cuts no value. Others search all
    pairs of ``STEPS`` / 4 thresholds. The error is that of the centers of the bins.
    """

    def clipped(self) -> tuple[float, float]:
        """Return the range of least squared error."""
        used = self.counts > 0
        values, weights = self.centers()[used], self.counts[used].double()
        values = values.clamp(self.lo, self.hi)
        if self.scheme.symmetric:
            widest = widest_range(self.scheme)
            shrinks = [(s, s) for s in [*_shrinks(STEPS), widest]]
        else:
            coarse = _shrinks(STEPS // 4)
            shrinks = [(a, b) for a in coarse for b in coarse]
        ranges = [(self.lo * a, self.hi * b) for a, b in shrinks]
        losses = [self._loss(lo, hi, values, weights) for lo, hi in ranges]
        return ranges[losses.index(min(losses))]

    def _loss(self, lo: float, hi: float, values: torch.Tensor, weights: torch.Tensor) -> float:
        device = values.device
        qparams = qparams_from_range(
            torch.tensor(lo, dtype=torch.float32, device=device),
            torch.tensor(hi, dtype=torch.float32, device=device),
            self.scheme,
            largest=self.largest,
        )
        error = fake_quantize(values, *qparams, self.scheme) - values
        return float((error.double().square() * weights).sum())


def _shrinks(steps: int) -> list[float]:
    """Return factors from 1 down to a fifth."""
    return [1 - 0.8 * i / steps for i in range(steps + 1)]


class PerTensorHistogramObserver(PerTensorMSEObserver):
    """The documented name of the observer that minimizes the squared error."""


class PerTensorHistogramObserverPro(PerTensorHistogramObserver):
    """Another documented name of ``PerTensorHistogramObserver``."""
