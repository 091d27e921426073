"""An observer of keys and values that have a scale per head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.observer.histogram import PerTensorMSEObserver
from quark.torch.quantization.observer.observer import HasScheme, ObserverBase


@dataclass(frozen=True)
class _OfOneHead:
    """The specification of one head."""

    scheme: Scheme


class PerHeadMSEObserver(ObserverBase):
    """Clips the range of each head to minimize the squared error of quantization.

    Few tokens have keys and values far larger than all others (attention sinks). In 4 bits, a range
    with room for them leaves two or three codes to the other tokens. Batches give the result of the
    concatenated batch, as in ``PerTensorMSEObserver``.

    Args:
        qspec: Specification of the tensor.
        device: Device of the counts.

    Attributes:
        heads: The observer of each head; empty before the first tensor.

    Raises:
        ValueError: The specification has no static scale per head.
    """

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        if self.scheme.qscheme is not QSchemeType.per_head:
            raise ValueError(
                "PerHeadMSEObserver is for static scales with qscheme='per_head', got "
                f"{self.scheme.qscheme.name!r}."
            )
        self.heads: list[PerTensorMSEObserver] = []

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of each head of ``x``, (..., channels); an empty one changes nothing.

        Raises:
            FloatingPointError: NaN or infinity was observed.
        """
        if x.numel() == 0:
            return
        size = x.shape[-1] if self.scheme.group == -1 else self.scheme.group
        parts = x.reshape(*x.shape[:-1], -1, size).unbind(-2)
        if not self.heads:
            spec = _OfOneHead(replace(self.scheme, qscheme=QSchemeType.per_tensor, group=-1))
            self.heads = [PerTensorMSEObserver(spec, self.device) for _ in parts]
        for head, part in zip(self.heads, parts, strict=True):
            head(part)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return not self.heads

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scales and zero points, (heads,).

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.is_empty:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        pairs = [head.calculate_qparams() for head in self.heads]
        zeros = [zero for _, zero in pairs if zero is not None]
        return torch.stack([scale for scale, _ in pairs]), torch.stack(zeros) if zeros else None

    def reset(self) -> None:
        """Clear the counts."""
        self.heads = []
