"""What is kept of a tensor for ranges that are settled later."""

from __future__ import annotations

import torch

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.observer.histogram import Histogram, HistogramObserver, limit_of
from quark.torch.quantization.observer.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
)

CPU = torch.device("cpu")


class TensorRange:
    """Range of each channel and histogram of the whole of a tensor, in main memory.

    Attributes:
        channels: Smallest and largest value of each channel, (channels,) float32.
        histogram: Counts of all values.
    """

    def __init__(self) -> None:
        self.channels = ChannelRange()
        self.histogram = Histogram(CPU)

    @classmethod
    def of(cls, lo: torch.Tensor, hi: torch.Tensor, counts: torch.Tensor) -> TensorRange:
        """Return what was kept before.

        Args:
            lo: (channels,) float32.
            hi: (channels,) float32.
            counts: Those of the histogram.
        """
        found = cls()
        found.channels.lo, found.channels.hi = lo, hi
        seen = found.histogram
        seen.lo, seen.hi, seen.counts = float(lo.min()), float(hi.max()), counts
        seen.limit = limit_of(seen.lo, seen.hi)
        return found

    def __call__(self, x: torch.Tensor) -> None:
        """Take in (tokens, channels).

        Raises:
            FloatingPointError: NaN or infinity was observed.
        """
        if len(x):
            self.histogram.observe(x)
            self.channels(torch.stack(x.aminmax(dim=0)).to(CPU))

    def merge(self, other: TensorRange) -> None:
        """Take in what another has seen."""
        lo, hi = other.channels.lo, other.channels.hi
        if lo is not None and hi is not None:
            self.histogram.merge(other.histogram)
            self.channels(torch.stack([lo, hi]))

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed."""
        return self.histogram.is_empty

    def show(self, quantizer: TensorQuantizer, device: torch.device) -> None:
        """Let the observer of a quantizer know what it would, had it seen the tensor.

        Args:
            quantizer: One whose specification ``is_told`` by ranges.
            device: Where its scales are to be.
        """
        observer, lo, hi = quantizer.observer, self.channels.lo, self.channels.hi
        if lo is None or hi is None:
            return
        observer.device = device
        observer.reset()
        if isinstance(observer, HistogramObserver):
            observer.merge(self.histogram)
            return
        assert isinstance(observer, MinMaxObserver)
        if observer.scheme.qscheme is QSchemeType.per_tensor:
            lo, hi = lo.amin(), hi.amax()
        observer.widen(lo.to(device), hi.to(device))


def is_told(spec: QuantizationSpec) -> bool:
    """Whether ranges of channels and a histogram tell the settled ranges of activations."""
    if spec.is_dynamic or not spec.needs_data:
        return True  # at most the range of the whole tensor is settled
    kind = spec.observer_cls or MinMaxObserver
    if issubclass(kind, HistogramObserver):
        return True
    if not issubclass(kind, MinMaxObserver) or issubclass(kind, MovingAverageMinMaxObserver):
        return False
    scheme = spec.scheme
    by_channel = scheme.qscheme is QSchemeType.per_channel and scheme.axis == -1
    return by_channel or scheme.qscheme is QSchemeType.per_tensor
