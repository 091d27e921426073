"""Observers keep statistics of what passes by; ``numerics.scales`` solves for scale and zero point.

The documented classes are names for one statistic under one granularity, which the specification
states too. A new statistic is a subclass of ``ObserverBase`` and a line in ``registry``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from quark.torch.numerics.scale_formats import POF2
from quark.torch.numerics.scales import (
    block_range,
    qparams_from_range,
    tensor_scale_from_range,
)
from quark.torch.numerics.scheme import Scheme


class HasScheme(Protocol):
    """What an observer asks of a specification."""

    @property
    def scheme(self) -> Scheme:
        """How the tensor is quantized."""
        ...


class ObserverBase:
    """Sees tensors one after another and answers with scale and zero point.

    Args:
        qspec: Specification of the tensor, for its ``scheme``.
        device: Where statistics are kept; by default where the tensors are.
    """

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        self.scheme = qspec.scheme
        self.device = device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Take ``x`` into the statistics and return it unchanged."""
        self.observe(x.detach())
        return x

    def observe(self, x: torch.Tensor) -> None:
        """Take ``x`` into the statistics."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        raise NotImplementedError

    def calculate_qparams(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and zero point for what was observed.

        Raises:
            RuntimeError: Nothing was observed.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError


class PlaceholderObserver(ObserverBase):
    """For formats without a scale: sees nothing and has nothing to say."""

    def observe(self, x: torch.Tensor) -> None:
        """Do nothing."""

    @property
    def is_empty(self) -> bool:
        """Never: there is nothing to wait for."""
        return False

    def calculate_qparams(self) -> tuple[None, None]:
        """Return no scale and no zero point."""
        return None, None

    def reset(self) -> None:
        """Do nothing."""


class MinMaxObserver(ObserverBase):
    """Running minimum and maximum of each block, in float32.

    The result does not depend on how the data is cut in batches. Ranges can be widened from
    outside (``lo`` and ``hi`` are plain tensors), which is how layers come to share a scale.
    """

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.lo: torch.Tensor | None = None
        self.hi: torch.Tensor | None = None

    def observe(self, x: torch.Tensor) -> None:
        """Widen the ranges to include ``x``; an empty tensor changes nothing."""
        if x.numel() == 0:
            return
        lo, hi = (r.to(self.device) for r in block_range(x, self.scheme))
        self.widen(lo, hi)

    def widen(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        """Widen the ranges to include [lo, hi]."""
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return self.lo is None

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale and zero point of the observed range.

        Raises:
            RuntimeError: Nothing was observed.
            FloatingPointError: NaN or infinity was observed.
        """
        if self.lo is None or self.hi is None:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        if not bool((torch.isfinite(self.lo) & torch.isfinite(self.hi)).all()):
            raise FloatingPointError("NaN or infinite values were observed.")
        return self.qparams()

    def qparams(
        self, tensor_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale and zero point of the range, given the scale of the whole tensor."""
        assert self.lo is not None and self.hi is not None
        return qparams_from_range(self.lo, self.hi, self.scheme, tensor_scale)

    def tensor_scale(self, scheme: Scheme) -> torch.Tensor:
        """Return the scale [] that the block scales of ``scheme`` are relative to.

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.lo is None or self.hi is None:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        return tensor_scale_from_range(self.lo, self.hi, scheme)

    def reset(self) -> None:
        """Forget the ranges."""
        self.lo = self.hi = None


class MovingAverageMinMaxObserver(MinMaxObserver):
    """Exponential moving average of the minimum and maximum of each tensor.

    It follows recent data, so it depends on the order of the batches.

    Args:
        qspec: Specification of the tensor.
        device: Where statistics are kept.
        averaging_constant: Weight of a new tensor.
    """

    def __init__(
        self,
        qspec: HasScheme,
        device: torch.device | None = None,
        averaging_constant: float = 0.01,
    ) -> None:
        super().__init__(qspec, device)
        self.averaging_constant = averaging_constant

    def widen(self, lo: torch.Tensor, hi: torch.Tensor) -> None:
        """Move the ranges towards [lo, hi]."""
        weight = self.averaging_constant
        # Halves, because the distance of two numbers may be larger than any.
        self.lo = lo if self.lo is None else torch.lerp(self.lo / 2, lo / 2, weight) * 2
        self.hi = hi if self.hi is None else torch.lerp(self.hi / 2, hi / 2, weight) * 2


class PerTensorMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of the whole tensor."""


class PerChannelMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each channel."""


class PerGroupMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each group of an integer format."""


class PerBlock2DMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each two-dimensional block."""


class PerBlockMXObserver(MinMaxObserver):
    """Minimum and maximum of each group of a float, or of each block that shares an exponent."""


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """Another documented name of the same."""


class PerBlockBFPObserver(MinMaxObserver):
    """Minimum and maximum of each block, or sub-block, of a format with exponents of its own."""


class PerTensorPowOf2MinMaxObserver(MinMaxObserver):
    """Minimum and maximum; the scale is the nearest power of two."""

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.scheme = replace(self.scheme, scale=POF2)


class PerChannelPowOf2MinMaxObserver(PerTensorPowOf2MinMaxObserver):
    """Minimum and maximum of each channel; scales are the nearest powers of two."""
