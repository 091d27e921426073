"""Ranges and histograms of activations, stored for static ranges that are computed later."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.pipeline.accumulators import ChannelRange
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.reducer import Reducer
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from quark.torch.quantization.observer.histogram import Histogram, HistogramObserver, limit_of
from quark.torch.quantization.observer.observer import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
)

CPU = torch.device("cpu")


class TensorRange:
    """Range of each channel of a tensor, and histogram of the whole, in main memory.

    Attributes:
        channels: Smallest and largest value of each channel, (channels,) float32.
        histogram: Counts of all values.
    """

    def __init__(self) -> None:
        self.channels = ChannelRange()
        self.histogram = Histogram(CPU)

    @classmethod
    def from_tensors(cls, lo: torch.Tensor, hi: torch.Tensor, counts: torch.Tensor) -> TensorRange:
        """Return the range that was stored as these tensors.

        Args:
            lo: (channels,) float32.
            hi: (channels,) float32.
            counts: Counts of the histogram.
        """
        result = cls()
        result.channels.lo, result.channels.hi = lo, hi
        histogram = result.histogram
        histogram.lo, histogram.hi, histogram.counts = float(lo.min()), float(hi.max()), counts
        histogram.limit = limit_of(histogram.lo, histogram.hi)
        return result

    def __call__(self, x: torch.Tensor) -> None:
        """Observe (tokens, channels).

        Raises:
            FloatingPointError: A value is NaN or infinite.
        """
        if len(x):
            self.histogram.observe(x)
            self.channels(torch.stack(x.aminmax(dim=0)).to(CPU))

    def merge(self, other: TensorRange) -> None:
        """Include the values that another one has observed."""
        lo, hi = other.channels.lo, other.channels.hi
        if lo is not None and hi is not None:
            self.histogram.merge(other.histogram)
            self.channels(torch.stack([lo, hi]))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return self.histogram.is_empty

    def fill_observer(self, quantizer: TensorQuantizer, device: torch.device) -> None:
        """Set the observer of a quantizer to the state it would have after observing the tensor.

        Args:
            quantizer: A quantizer whose specification satisfies ``ranges_suffice``.
            device: Device of the scales to be computed.
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
        elif observer.scheme.qscheme is QSchemeType.per_head:
            heads = -1, observer.scheme.group
            lo, hi = lo.view(heads).amin(1), hi.view(heads).amax(1)
        observer.widen(lo.to(device), hi.to(device))


def can_combine(quantizer: TensorQuantizer) -> bool:
    """Whether the ranges of parts of the data give the range of the whole, in any order."""
    kind = type(quantizer.observer)
    methods = [getattr(kind, name, None) for name in ("observe", "widen")]
    if issubclass(kind, Histogram):
        return methods[0] is Histogram.observe
    return methods == [MinMaxObserver.observe, MinMaxObserver.widen]


def combine_observers(quantizers: Mapping[str, TensorQuantizer]) -> None:
    """Let the observers of all processes include what each of them has observed.

    Args:
        quantizers: Quantizers by name that satisfy ``can_combine``.
    """
    histograms: dict[str, Histogram] = {}
    ranges: dict[str, ChannelRange] = {}
    for name, quantizer in quantizers.items():
        observer = quantizer.observer
        if isinstance(observer, Histogram):
            histograms[name] = Histogram(observer.device)
            histograms[name].set_tensors(observer.tensors())
        elif isinstance(observer, MinMaxObserver):
            ranges[name] = ChannelRange()
            ranges[name].lo, ranges[name].hi = observer.lo, observer.hi
    histograms = Reducer(histograms, lambda leaf: Histogram()).combine(histograms)
    ranges = Reducer(ranges, lambda leaf: ChannelRange()).combine(ranges)
    largest = processes().exchange({name: q.observer.largest for name, q in quantizers.items()})
    for name, quantizer in quantizers.items():
        observer = quantizer.observer
        observer.largest = min(every[name] for every in largest)
        if isinstance(observer, Histogram):
            observer.set_tensors(histograms[name].tensors())
        elif isinstance(observer, MinMaxObserver):
            observer.lo, observer.hi = ranges[name].lo, ranges[name].hi


def ranges_suffice(spec: QuantizationSpec) -> bool:
    """Whether a ``TensorRange`` is enough to compute the scales of an activation."""
    if spec.is_dynamic or not spec.needs_data:
        return True  # at most the range of the whole tensor is static
    kind = spec.observer_cls or MinMaxObserver
    if issubclass(kind, HistogramObserver):
        return True
    if not issubclass(kind, MinMaxObserver) or issubclass(kind, MovingAverageMinMaxObserver):
        return False
    scheme = spec.scheme
    is_per_channel = scheme.qscheme is QSchemeType.per_channel and scheme.axis == -1
    return is_per_channel or scheme.qscheme in (QSchemeType.per_tensor, QSchemeType.per_head)
