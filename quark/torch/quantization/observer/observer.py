"""Observers keep statistics of what passes by; ``numerics.scales`` solves for scale and zero point.

The documented classes are names for one statistic under one granularity, which the specification
states too. A new statistic is a subclass of ``ObserverBase`` and a line in ``OBSERVERS``.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quark.torch.numerics.scales import block_range, qparams_from_range
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
        if not bool(torch.isfinite(self.hi - self.lo).all()):
            raise FloatingPointError("NaN or infinite values were observed.")
        return qparams_from_range(self.lo, self.hi, self.scheme)

    def reset(self) -> None:
        """Forget the ranges."""
        self.lo = self.hi = None


class PerTensorMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of the whole tensor."""


class PerChannelMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each channel."""


class PerGroupMinMaxObserver(MinMaxObserver):
    """Minimum and maximum of each group."""


# Classes that a configuration may name: nothing else is ever looked up.
OBSERVERS: dict[str, type[ObserverBase]] = {
    cls.__name__: cls
    for cls in (
        PlaceholderObserver,
        PerTensorMinMaxObserver,
        PerChannelMinMaxObserver,
        PerGroupMinMaxObserver,
    )
}

# Documented ``observer_method`` names of per-tensor statistics.
OBSERVER_METHODS: dict[str, type[ObserverBase]] = {"min_max": PerTensorMinMaxObserver}
