"""Observers record statistics of tensors; ``numerics.scales`` computes scales from them.

Most documented classes are names for one statistic under one granularity. The granularity itself
comes from the specification. A new statistic is a subclass of ``ObserverBase`` and a line in
``registry``.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

import torch

from quark.torch.numerics.finite import is_finite
from quark.torch.numerics.scale_formats import POF2
from quark.torch.numerics.scales import (
    BFLOAT16_MAX,
    block_range,
    largest_value,
    qparams_from_range,
    tensor_scale_from_range,
)
from quark.torch.numerics.scheme import Scheme


class HasScheme(Protocol):
    """A specification, as far as observers need it."""

    @property
    def scheme(self) -> Scheme:
        """How the tensor is quantized."""
        ...


class ObserverBase:
    """Records statistics of tensors and computes scale and zero point from them.

    Args:
        qspec: Specification of the tensor; its ``scheme`` is used.
        device: Device of the statistics, by default that of the tensors.

    Attributes:
        largest: Largest magnitude that a code may stand for, by the types of the tensors.
        is_for_integers: Whether it takes integers alone.
    """

    is_for_integers = False

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        self.scheme = qspec.scheme
        self.device = device
        self.largest = BFLOAT16_MAX

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Record the statistics of ``x`` and return it unchanged."""
        self.largest = min(self.largest, largest_value(x.dtype))
        self.observe(x.detach())
        return x

    def observe(self, x: torch.Tensor) -> None:
        """Record the statistics of ``x``."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        raise NotImplementedError

    def calculate_qparams(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the scale and zero point for the observed tensors.

        Raises:
            RuntimeError: Nothing was observed.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Clear the statistics."""
        raise NotImplementedError


class PlaceholderObserver(ObserverBase):
    """Observer of formats without a scale: it records nothing."""

    def observe(self, x: torch.Tensor) -> None:
        """Do nothing."""

    @property
    def is_empty(self) -> bool:
        """False: no data is needed."""
        return False

    def calculate_qparams(self) -> tuple[None, None]:
        """Return no scale and no zero point."""
        return None, None

    def reset(self) -> None:
        """Do nothing."""


class MinMaxObserver(ObserverBase):
    """Running minimum and maximum of each block, in float32.

    The result does not depend on the division of the data into batches.

    Attributes:
        lo: Smallest value of each block, or None before the first tensor.
        hi: Largest value of each block, likewise.
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
        """Widen the ranges to include [lo, hi].

        Raises:
            ValueError: They have another number of channels.
        """
        if self.lo is not None and self.lo.shape != lo.shape:
            counts = " and ".join(str(ranges.numel()) for ranges in (self.lo, lo))
            raise ValueError(
                f"Tensors with {counts} channels along ch_axis={self.scheme.axis} have no common "
                "scales. Give the axis of the channels, or set is_dynamic=True."
            )
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
        # Of two finite ends, half of the distance is finite, and of no others.
        if not is_finite(torch.add(self.hi / 2, self.lo, alpha=-0.5)):
            raise FloatingPointError("NaN or infinite values were observed.")
        return self.qparams()

    def qparams(
        self, tensor_scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scale and zero point of the range, given a tensor scale for two levels."""
        assert self.lo is not None and self.hi is not None
        return qparams_from_range(self.lo, self.hi, self.scheme, tensor_scale, self.largest)

    def tensor_scale(self, scheme: Scheme) -> torch.Tensor:
        """Return the tensor scale [] of the two-level scales of ``scheme``.

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.lo is None or self.hi is None:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        return tensor_scale_from_range(self.lo, self.hi, scheme)

    def reset(self) -> None:
        """Clear the ranges."""
        self.lo = self.hi = None


class MovingAverageMinMaxObserver(MinMaxObserver):
    """Exponential moving average of the minimum and maximum of each tensor.

    The result depends on the order of the batches.

    Args:
        qspec: Specification of the tensor.
        device: Device of the statistics.
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
        # lerp computes hi - self.hi, which may overflow: for -3e38 and 3e38. Halves do not.
        self.lo = lo if self.lo is None else torch.lerp(self.lo / 2, lo / 2, weight) * 2
        self.hi = hi if self.hi is None else torch.lerp(self.hi / 2, hi / 2, weight) * 2


class PerTensorMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of the whole tensor."""


class PerChannelMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each channel."""


class PerGroupMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each group of an integer format, or of each head."""


class PerBlock2DMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each two-dimensional block."""


class PerBlockMXObserver(MinMaxObserver):
    """Minimum and maximum of each group of a float format, or block with a shared exponent."""


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """Another documented name of ``PerBlockMXObserver``."""


class PerBlockBFPObserver(MinMaxObserver):
    """Minimum and maximum of each block or sub-block of a block floating-point format."""


class PerTensorPowOf2MinMaxObserver(MinMaxObserver):
    """Minimum and maximum; the scale is the nearest power of two."""

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.scheme = replace(self.scheme, scale=POF2)


class PerChannelPowOf2MinMaxObserver(PerTensorPowOf2MinMaxObserver):
    """Minimum and maximum of each channel; scales are the nearest powers of two."""


def __getattr__(name: str) -> Any:
    """Return a documented observer of another file, so that scripts import it from here."""
    registry = import_module("quark.torch.quantization.observer.registry")
    if name in registry.OBSERVERS:
        return registry.observer_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
