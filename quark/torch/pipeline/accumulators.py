"""What is kept of the inputs of layers while data runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from quark.torch.quantization.nn.layer import QuantMixin

Observe = Callable[[torch.Tensor], None]  # takes (tokens, channels)
STRIDE = 0x9E3779B1  # 2³² over the golden ratio, odd


class ChannelRange:
    """Smallest and largest value of each channel.

    Attributes:
        lo: (channels,), or None before any data.
        hi: Likewise.
    """

    def __init__(self) -> None:
        self.lo: torch.Tensor | None = None
        self.hi: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> None:
        """Take in (tokens, channels)."""
        if not len(x):
            return
        lo, hi = (r.float() for r in x.aminmax(dim=0))
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)

    @property
    def amax(self) -> torch.Tensor:
        """(channels,): largest magnitude."""
        assert self.lo is not None and self.hi is not None
        return torch.maximum(-self.lo, self.hi)


class Gram:
    """Sum of x xᵀ and of |x| over tokens: all that errors of linear layers depend on.

    The squared error of outputs under weights W + D is tr(D G Dᵀ) with G the sum of x xᵀ.

    Sums are in float32, those of float64 tensors in float64.

    Attributes:
        tokens: Number of tokens.
        is_pooled: Whether the statistics of other layers were mixed in.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._magnitude: torch.Tensor | None = None
        self.tokens = 0.0
        self.is_pooled = False

    @property
    def total(self) -> torch.Tensor | None:
        """(channels, channels) float32, or None before any data."""
        return None if self._total is None else self._total.float()

    @total.setter
    def total(self, total: torch.Tensor) -> None:
        self._total = total

    @property
    def magnitude(self) -> torch.Tensor | None:
        """(channels,) float32: sum of |x|; or None before any data."""
        return None if self._magnitude is None else self._magnitude.float()

    @magnitude.setter
    def magnitude(self, magnitude: torch.Tensor) -> None:
        self._magnitude = magnitude

    def __call__(self, x: torch.Tensor) -> None:
        """Take in (tokens, channels)."""
        if not len(x):
            return
        x = x if x.dtype is torch.float64 else x.float()
        if self._total is None or self._magnitude is None:
            self._total = x.new_zeros(x.shape[1], x.shape[1])
            self._magnitude = x.new_zeros(x.shape[1])
        self._total.addmm_(x.T, x)
        self._magnitude += x.abs().sum(0)
        self.tokens += len(x)

    def merge(self, other: Gram) -> None:
        """Add what another has seen."""
        if other._total is not None and other._magnitude is not None:
            if self._total is None or self._magnitude is None:
                self._total = torch.zeros_like(other._total)
                self._magnitude = torch.zeros_like(other._magnitude)
            self._total += other._total
            self._magnitude += other._magnitude
        self.tokens += other.tokens
        self.is_pooled |= other.is_pooled

    def to(self, device: torch.device | str, copy: bool = False) -> Gram:
        """Return the same on a device."""
        moved = Gram()
        moved.tokens, moved.is_pooled = self.tokens, self.is_pooled
        if self._total is not None and self._magnitude is not None:
            moved._total = self._total.to(device, copy=copy)
            moved._magnitude = self._magnitude.to(device, copy=copy)
        return moved

    def rescale_(self, by: torch.Tensor) -> None:
        """Follow inputs that are divided by ``by`` (channels,) from now on."""
        assert self._total is not None and self._magnitude is not None
        self._total.div_(by).div_(by.unsqueeze(1))
        self._magnitude.div_(by)


class Draw:
    """Some of the tokens, the same ones however the data is cut.

    Token i comes in the order of i · φ modulo 1. The first of any number in this order lie evenly
    among all tokens, and among positions in sequences of any length, which steps would not.

    Args:
        size: Number of tokens to keep.

    Attributes:
        tokens: (up to ``size``, channels) in the order they came, or None before any data.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokens: torch.Tensor | None = None
        self._places = torch.empty(0, dtype=torch.int64)
        self._seen = 0

    def __call__(self, x: torch.Tensor) -> None:
        """Take in (tokens, channels)."""
        if not len(x):
            return
        index = torch.arange(self._seen, self._seen + len(x))
        self._seen += len(x)
        places = torch.cat([self._places, index * STRIDE % 2**32])
        kept = places.argsort()[: self.size].sort().values
        self._places = places[kept]
        tokens = x if self.tokens is None else torch.cat([self.tokens, x])
        self.tokens = tokens[kept.to(x.device)]


class Sample:
    """Some of the tokens, as drawn by ``Draw``, and the range of each channel over all.

    Args:
        size: Number of tokens to keep.
    """

    def __init__(self, size: int) -> None:
        self.range = ChannelRange()
        self._draw = Draw(size)

    def __call__(self, x: torch.Tensor) -> None:
        """Take in (tokens, channels)."""
        self.range(x)
        self._draw(x)

    @property
    def is_empty(self) -> bool:
        """Whether no token came."""
        return self._draw.tokens is None

    @property
    def tokens(self) -> torch.Tensor:
        """(tokens, channels): up to ``size``."""
        assert self._draw.tokens is not None
        return self._draw.tokens

    def rescale_(self, by: torch.Tensor) -> None:
        """Follow inputs that are divided by ``by`` (channels,) from now on."""
        assert self.range.lo is not None and self.range.hi is not None
        for x in (self.tokens, self.range.lo, self.range.hi):
            x.div_(by)


@contextmanager
def observing(
    observers: Iterable[tuple[QuantMixin, Observe]], mask: Callable[[], torch.Tensor | None]
) -> Iterator[None]:
    """Show what layers multiply with their weights to observers while data runs.

    Tokens that are padding are left out, but for those which a router sends to experts.

    Args:
        observers: Layers, each with what looks at its input.
        mask: Returns which tokens of the present batch are not padding, or None for all.
    """

    def watch(observe: Observe) -> Callable[..., None]:
        def hook(layer: QuantMixin, args: tuple[torch.Tensor, ...]) -> None:
            x, kept = layer.quantized_input(args[0].detach()), mask()
            rows = x.reshape(-1, x.shape[-1])
            if kept is not None and x.shape[:-1] in (kept.shape, (kept.numel(),)):
                rows = rows[kept.flatten().to(x.device)]
            observe(rows)

        return hook

    handles = [m.register_forward_pre_hook(watch(o)) for m, o in observers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
