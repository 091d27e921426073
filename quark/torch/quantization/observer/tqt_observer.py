"""First threshold of a trained range whose scale is a power of two."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from quark.torch.numerics.exponents import power_of_two
from quark.torch.numerics.finite import is_finite
from quark.torch.numerics.qdq import fake_quantize
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.observer.histogram import Histogram
from quark.torch.quantization.observer.observer import HasScheme, ObserverBase
from quark.torch.quantization.observer.threshold_method import TQTThresholdInitMeth

OCTAVES = 10  # thresholds that are tried, each half of the one before


class HasThreshold(HasScheme, Protocol):
    """A specification, as far as ``TQTObserver`` needs it."""

    @property
    def threshold_init(self) -> TQTThresholdInitMeth:
        """How the first threshold is chosen."""
        ...


def threshold_scale(exponent: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the power-of-two scale of codes that reach the threshold 2**exponent, float32.

    Example: the exponent 1 and int8 give 2 / 128, so that the codes span [-2, 2 - 2 / 128].

    Args:
        exponent: Integers.
        scheme: Symmetric integers.
    """
    return power_of_two(exponent.to(torch.int32) - (scheme.fmt.bits - 1))


class TQTObserver(ObserverBase):
    """Chooses the first power-of-two threshold of a trained range (Jain et al. 2020, section 4).

    ``_3SD``: the power of two at or above abs(mean) + 3 standard deviations of each block. Sums are
    float64, so the division of the data into batches may change the last bit of the moments.
    ``_KL_J``: of a whole tensor, the threshold whose codes have the smallest Jeffreys divergence
    sum((p - q) * log(p / q)) from the histogram p of the values.
    """

    def __init__(self, qspec: HasThreshold, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.method = qspec.threshold_init
        self.reset()

    def reset(self) -> None:
        """Clear the statistics."""
        self._histogram = Histogram(self.device)
        self._moments: torch.Tensor | None = None  # (2, *scale shape) sums of x and x²
        self._count = 0.0

    def observe(self, x: torch.Tensor) -> None:
        """Add the moments or the histogram of ``x``; an empty tensor changes nothing.

        Raises:
            FloatingPointError: NaN or infinity was observed.
        """
        if x.numel() == 0:
            return
        if self.method is TQTThresholdInitMeth._KL_J:
            self._histogram.observe(x)
            return
        if not is_finite(x):
            raise FloatingPointError("NaN or infinite values were observed.")
        blocks, shape = self.scheme.blocks(x.shape), self.scheme.scale_shape(x.shape)
        view = blocks.split(x).double()
        sums = torch.stack([view.sum(blocks.reduced), view.square().sum(blocks.reduced)])
        sums = sums.reshape(2, *shape).to(self.device)
        self._moments = sums if self._moments is None else self._moments + sums
        self._count += x.numel() / max(1, sums[0].numel())

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return self._moments is None and self._histogram.is_empty

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale of the first threshold, and the zero point in the middle of the codes.

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.is_empty:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        if self._moments is None:
            exponent = self._least_divergence()
        else:
            mean, square = self._moments / self._count
            deviation = (square - mean.square()).clamp(min=0).sqrt()
            threshold = (mean.abs() + 3 * deviation).clamp(min=2.0**-100)
            exponent = threshold.log2().ceil()
        return self._qparams(exponent)

    def _qparams(self, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fmt = self.scheme.fmt
        scale = threshold_scale(exponent, self.scheme)
        return scale, torch.full_like(scale, fmt.middle, dtype=torch.int32)

    def _least_divergence(self) -> torch.Tensor:
        """Return the exponent [] of the threshold of least divergence; the largest of equals."""
        histogram = self._histogram
        counts, centers = histogram.counts.double(), histogram.centers()
        used = counts > 0
        counts, centers = counts[used], centers[used]
        top = math.ceil(math.log2(histogram.limit or 2.0**-100))
        exponents = torch.arange(top, top - OCTAVES, -1, device=counts.device)
        losses = [_divergence(counts, self._rounded(centers, e)) for e in exponents]
        return exponents[torch.stack(losses).argmin()]

    def _rounded(self, x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x, *self._qparams(exponent), self.scheme)


def _divergence(counts: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the Jeffreys divergence [] of a histogram from itself after quantization.

    Args:
        counts: Counts of the bins, all positive, float64.
        codes: Quantized value of each bin. Bins of one value share their counts equally.
    """
    _, level = codes.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    zeros = torch.zeros(int(level.max()) + 1, dtype=counts.dtype, device=counts.device)
    mass = zeros.index_add(0, level, counts)
    bins = zeros.index_add(0, level, torch.ones_like(counts))
    p, q = counts / counts.sum(), (mass / bins)[level] / counts.sum()
    return ((p - q) * (p / q).log()).sum()
