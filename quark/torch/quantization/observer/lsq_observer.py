"""First step size of a trained range, from the mean magnitude of the values."""

from __future__ import annotations

import torch

from quark.torch.numerics.scales import EPS, largest_scale, round_scale
from quark.torch.quantization.observer.observer import HasScheme, MinMaxObserver, ObserverBase


class LSQObserver(ObserverBase):
    """Starts a step size at 2 * mean(abs(x)) / sqrt(largest code) (Esser et al. 2020, section 2.1).

    Asymmetric ranges start at minimum and maximum instead. The means of several batches are
    summed in float64, so the division of the data into batches may change the last bit.
    """

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self._range = MinMaxObserver(qspec, device)
        self.reset()

    def reset(self) -> None:
        """Clear the statistics."""
        self._range.reset()
        self._sum: torch.Tensor | None = None
        self._count = 0.0

    def observe(self, x: torch.Tensor) -> None:
        """Add magnitudes and range of ``x``; an empty tensor changes nothing."""
        if x.numel() == 0:
            return
        self._range(x)
        blocks, shape = self.scheme.blocks(x.shape), self.scheme.scale_shape(x.shape)
        sums = blocks.split(x).abs().sum(blocks.reduced, dtype=torch.float64)
        sums = sums.reshape(shape).to(self.device)
        self._sum = sums if self._sum is None else self._sum + sums
        self._count += x.numel() / max(1, sums.numel())

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return self._range.is_empty

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first scale and the zero point.

        Raises:
            RuntimeError: Nothing was observed.
            FloatingPointError: NaN or infinity was observed.
        """
        scale, zero_point = self._range.calculate_qparams()
        fmt = self.scheme.fmt
        if not (self.scheme.symmetric or fmt.is_float):
            return scale, zero_point
        assert self._sum is not None
        largest_code = fmt.max_value if fmt.is_float else (fmt.qmax - fmt.qmin) // 2
        step = 2 * self._sum / self._count / max(1.0, largest_code) ** 0.5
        step = round_scale(step.float().clamp(min=EPS), self.scheme.scale)
        return step.clamp(max=largest_scale(self.scheme, self.largest)), zero_point
