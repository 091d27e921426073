"""Figures of one quantized weight: errors, outliers, scales, histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

BINS = 61  # of a histogram; odd, so that zero has one of its own
ROUNDS = 8  # of fitting factors of rows and columns to a weight
SAMPLE = 256  # rows and columns that tell whether a weight was rescaled
GAIN = 0.5  # share of the squared error that is left if a weight was rescaled, at most


@dataclass(frozen=True)
class Histogram:
    """Distribution of values before and after quantization.

    Attributes:
        limit: Bins have the same width and reach from ``-limit`` to ``limit``.
        before: Values in each bin, None where the original is not known.
        after: The same once quantized.
    """

    limit: float
    before: list[int] | None
    after: list[int]


@dataclass(frozen=True)
class Values:
    """Magnitudes of values.

    Attributes:
        rms: Root of the mean square.
        largest: Largest magnitude.
    """

    rms: float
    largest: float

    @property
    def peak(self) -> float:
        """Largest magnitude in units of the root mean square; 0 where all is zero."""
        return self.largest / self.rms if self.rms else 0.0


@dataclass(frozen=True)
class Scales:
    """Distribution of the scales of a weight.

    Attributes:
        count: How many there are.
        zeros: How many are zero.
        least: Smallest of the others, 0 if there are none.
        median: Their median.
        most: Largest.
        exponent: Power of two at or below the smallest.
        powers: How many lie between each power of two, from ``exponent`` on, and the next.
    """

    count: int
    zeros: int
    least: float
    median: float
    most: float
    exponent: int
    powers: list[int]


@dataclass(frozen=True)
class WeightError:
    """Error of a weight against the original.

    Attributes:
        change: ``rounded``: the original weight, quantized. ``rescaled``: its rows and columns were
            multiplied by factors first, as AWQ and SmoothQuant do, which are undone elsewhere; the
            error is that from the rescaled weight. ``other``: nothing alike, as after a rotation;
            there is no error then.
        relative: Norm of the error in units of the norm of the weight.
        sqnr: Signal-to-noise ratio in decibels, None where there is no error.
    """

    change: str
    relative: float | None = None
    sqnr: float | None = None


def values_of(x: torch.Tensor) -> Values:
    """Return the magnitudes of the values of a tensor."""
    if not x.numel():
        return Values(0.0, 0.0)
    return Values(float(x.float().square().mean().sqrt()), float(x.abs().max()))


def histogram(before: torch.Tensor | None, after: torch.Tensor) -> Histogram:
    """Return histograms of a tensor after quantization and, if it is known, before."""
    shown = [x for x in (before, after) if x is not None and x.numel()]
    limit = max((float(x.abs().max()) for x in shown), default=0.0) or 1.0
    counts = [_counts(x, limit) for x in shown]
    return Histogram(limit, counts[0] if before is not None else None, counts[-1])


def _counts(x: torch.Tensor, limit: float) -> list[int]:
    return [int(n) for n in torch.histc(x.float(), BINS, -limit, limit).tolist()]


def scales_of(scale: torch.Tensor | None) -> Scales | None:
    """Return the distribution of the scales of a weight, None if it has none."""
    if scale is None:
        return None
    flat = scale.detach().float().flatten()
    used = flat[flat > 0]
    zeros = flat.numel() - used.numel()
    if not used.numel():
        return Scales(flat.numel(), zeros, 0.0, 0.0, 0.0, 0, [])
    powers = torch.frexp(used).exponent - 1
    first = int(powers.min())
    counts = torch.bincount((powers - first).long()).tolist()
    least, most = float(used.min()), float(used.max())
    return Scales(flat.numel(), zeros, least, float(used.median()), most, first, counts)


def compare(original: torch.Tensor, found: torch.Tensor) -> tuple[WeightError, torch.Tensor | None]:
    """Compare a quantized weight with the original.

    Args:
        original: Weight of the float model, float32.
        found: Quantized weight of the same shape, float32.

    Returns:
        The error; and what the weight was rounded from, or None if nothing is alike.
    """
    error = float((found - original).square().sum())
    energy = float(original.square().sum())
    change, reference = "rounded", original
    if original.dim() > 1 and _is_rescaled(_sample(original), _sample(found)):
        change, reference = "rescaled", _fitted(original, found)
        error, energy = float((found - reference).square().sum()), float(reference.square().sum())
    if error > energy:
        return WeightError("other"), None
    sqnr = 10 * math.log10(energy / error) if error else None
    relative = math.sqrt(error / energy) if energy else 0.0
    return WeightError(change, relative, sqnr), reference


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return some rows and columns of a weight, evenly spread."""
    steps = [-(-length // SAMPLE) for length in weight.shape]
    return weight[tuple(slice(None, None, step) for step in steps)]


def _is_rescaled(original: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether factors of rows and columns explain most of the difference of two weights."""
    error = float((found - original).square().sum())
    return error > 0 and float((found - _fitted(original, found)).square().sum()) < GAIN * error


def _fitted(original: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the original with the factors of rows and columns that bring it nearest to another.

    Least squares, in turn for columns and rows. Where a factor would not be positive it is 1:
    what is rounded to zero altogether is an error, not a rescaling.
    """
    fitted, found = original.flatten(1), found.flatten(1)
    for turn in range(ROUNDS):
        axis = turn % 2
        by = (found * fitted).sum(axis, keepdim=True) / fitted.square().sum(axis, keepdim=True)
        fitted = fitted * torch.where(by > 0, by, 1.0)  # NaN, where all is zero, is not positive
    return fitted.view_as(original)
