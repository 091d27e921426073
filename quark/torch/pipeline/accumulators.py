"""Accumulators of statistics of the inputs of layers."""

from __future__ import annotations

import torch

from quark.torch.pipeline.half_products import multiplies_halves, product
from quark.torch.pipeline.processes import State

PANEL = 256  # channels of the parts of a sum of x xᵀ
STRIDE = 0x9E3779B1  # 2³² divided by the golden ratio, odd


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
        """Observe (tokens, channels)."""
        if not len(x):
            return
        lo, hi = (r.float() for r in x.aminmax(dim=0))
        self.lo = lo if self.lo is None else torch.minimum(self.lo, lo)
        self.hi = hi if self.hi is None else torch.maximum(self.hi, hi)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return self.lo is None

    def merge(self, other: ChannelRange) -> None:
        """Include the values that another one has observed."""
        if other.lo is not None and other.hi is not None:
            self(torch.stack([other.lo, other.hi]))

    def tensors(self) -> State:
        """Return smallest and largest values."""
        return self.lo, self.hi

    def set_tensors(self, tensors: State) -> None:
        """Replace smallest and largest values."""
        self.lo, self.hi = tensors

    @property
    def amax(self) -> torch.Tensor:
        """(channels,): largest magnitude."""
        assert self.lo is not None and self.hi is not None
        return torch.maximum(-self.lo, self.hi)


class Gram:
    """Sums of x xᵀ and of |x| over tokens, on which all errors of linear layers depend.

    The squared error of the outputs under weights W + D is tr(D G Dᵀ) with G the sum of x xᵀ. Sums
    are in float32, those of float64 tensors in float64. A convolution of several groups has sums
    for each, along a first axis; its tokens are the windows.

    Attributes:
        tokens: Number of tokens.
        is_pooled: Whether the statistics of other experts were mixed in.
        held_out: Sum of x xᵀ over a part of the tokens, half of the data; None if unknown.
        noise: Sum of what rounding has added to the inputs, (channels,); None if nothing, or
            unknown.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._magnitude: torch.Tensor | None = None
        self.tokens = 0.0
        self.is_pooled = False
        self.held_out: torch.Tensor | None = None
        self.noise: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor | None:
        """(..., channels, channels) float32: sum of x xᵀ; or None before any data."""
        return None if self._total is None else self._total.float()

    @total.setter
    def total(self, total: torch.Tensor) -> None:
        self._total = total

    def mean(self) -> torch.Tensor | None:
        """Return the mean of x xᵀ, (..., channels, channels) float32; None before any data."""
        total = self.total
        return None if total is None else total / max(self.tokens, 1)

    def take_mean(self) -> torch.Tensor | None:
        """Return the mean of x xᵀ in the memory of the sum, which is forgotten."""
        total, self._total = self.total, None
        return None if total is None else total.div_(max(self.tokens, 1))

    def mean_noise(self) -> torch.Tensor | None:
        """Return the mean of what rounding has added to the inputs, (channels,), or None."""
        return None if self.noise is None else self.noise / max(self.tokens, 1)

    @property
    def magnitude(self) -> torch.Tensor | None:
        """(..., channels) float32: sum of |x|; or None before any data."""
        return None if self._magnitude is None else self._magnitude.float()

    @magnitude.setter
    def magnitude(self, magnitude: torch.Tensor) -> None:
        self._magnitude = magnitude

    def __call__(self, x: torch.Tensor) -> None:
        """Observe (tokens, channels) or (groups, tokens, channels)."""
        if not x.numel():
            return
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        *groups, tokens, channels = x.shape
        if self._total is None or self._magnitude is None:
            self._total = x.new_zeros(*groups, channels, channels, dtype=dtype)
            self._magnitude = x.new_zeros(*groups, channels, dtype=dtype)
        self._magnitude += x.abs().sum(-2, dtype=dtype)
        _add_gram_(self._total, x if multiplies_halves(x) else x.to(dtype))
        self.tokens += tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed."""
        return self._total is None

    def tensors(self) -> State:
        """Return the sums and the number of tokens."""
        tokens = torch.tensor(self.tokens, dtype=torch.float64, device="cpu")
        return self._total, self._magnitude, tokens

    def set_tensors(self, tensors: State) -> None:
        """Replace the sums and the number of tokens."""
        self._total, self._magnitude, tokens = tensors
        assert tokens is not None
        self.tokens = float(tokens)

    def merge(self, other: Gram) -> None:
        """Add the sums of another accumulator."""
        if other._total is not None and other._magnitude is not None:
            if self._total is None or self._magnitude is None:
                self._total = torch.zeros_like(other._total)
                self._magnitude = torch.zeros_like(other._magnitude)
            self._total += other._total
            self._magnitude += other._magnitude
        self.tokens += other.tokens
        self.is_pooled |= other.is_pooled

    def to(self, device: torch.device | str, copy: bool = False) -> Gram:
        """Return the same sums on a device."""
        moved = Gram()
        moved.tokens, moved.is_pooled = self.tokens, self.is_pooled
        if self._total is not None and self._magnitude is not None:
            moved._total = self._total.to(device, copy=copy)
            moved._magnitude = self._magnitude.to(device, copy=copy)
        return moved

    def rescale_(self, factors: torch.Tensor) -> None:
        """Change the sums to those of inputs divided by ``factors`` (channels,)."""
        assert self._total is not None and self._magnitude is not None
        self._total.div_(factors).div_(factors.unsqueeze(1))
        self._magnitude.div_(factors)


class Sum:
    """Sum of tensors of one shape.

    Attributes:
        total: The sum; None before any tensor.
    """

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self.total is None

    def add(self, x: torch.Tensor) -> None:
        """Add a tensor."""
        self.total = x if self.total is None else self.total + x

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add aᵀ b, given (..., tokens, m) and (..., tokens, n)."""
        if self.total is None:
            self.total = a.new_zeros(*a.shape[:-2], a.shape[-1], b.shape[-1])
        _add_product_(self.total, a, b)

    def add_gram(self, x: torch.Tensor) -> None:
        """Add xᵀ x, given (..., tokens, channels)."""
        if self.total is None:
            self.total = x.new_zeros(*x.shape[:-2], x.shape[-1], x.shape[-1])
        _add_gram_(self.total, x)

    def merge(self, other: Sum) -> None:
        """Add another sum."""
        if other.total is not None:
            self.total = other.total if self.total is None else self.total.add_(other.total)

    def tensors(self) -> State:
        """Return the sum."""
        return (self.total,)

    def set_tensors(self, tensors: State) -> None:
        """Replace the sum."""
        (self.total,) = tensors


def _add_product_(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add aᵀ b to a sum, for each group where there are several.

    Products of half types are those of ``half_products``.
    """
    if a.dtype != total.dtype:
        total += product(a, b)
    elif total.dim() == 2:
        total.addmm_(a.T, b)
    else:
        total.baddbmm_(a.mT, b)


def _add_gram_(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add xᵀ x to a symmetric sum, (..., channels, channels).

    Only parts on the diagonal and above are products; those below are their transposes, as far as
    there are enough tokens for products to take longer than copies.
    """
    tokens, channels = x.shape[-2:]
    if tokens < PANEL or channels <= PANEL:
        _add_product_(total, x, x)
        return
    for start in range(0, channels, PANEL):
        own, later = slice(start, start + PANEL), slice(start + PANEL, None)
        _add_product_(total[..., own, start:], x[..., own], x[..., start:])
        total[..., later, own] = total[..., own, later].mT


class TokenSample:
    """A sample of the tokens, which does not depend on how the data is cut into batches.

    Token i has the priority i · φ modulo 1, and the tokens of least priority are kept. They are
    spread evenly over all tokens, and over positions in sequences of any length; every n-th token
    would not be.

    Args:
        size: Number of tokens to keep.
        start: Number of the first token.

    Attributes:
        tokens: (up to ``size``, channels) in the order of the data, or None before any data.
    """

    def __init__(self, size: int, start: int = 0) -> None:
        self.size = size
        self.tokens: torch.Tensor | None = None
        self._priorities = torch.empty(0, dtype=torch.int64, device="cpu")
        self._count = start

    def __call__(self, x: torch.Tensor) -> None:
        """Observe (tokens, channels)."""
        if not len(x):
            return
        index = torch.arange(self._count, self._count + len(x), device="cpu")
        self._count += len(x)
        # i · STRIDE mod 2³² is i / φ mod 1 in units of 2⁻³². Tokens 0 … 7 have the priorities 0,
        # 0.62, 0.24, 0.85, 0.47, 0.09, 0.71, 0.33: a sample of 4 keeps tokens 0, 2, 5, 7.
        self._keep(x, index * STRIDE % 2**32)

    def _keep(self, x: torch.Tensor, priorities: torch.Tensor) -> None:
        """Add tokens after the others, and keep those of least priority."""
        priorities = torch.cat([self._priorities, priorities])
        kept = priorities.argsort()[: self.size].sort().values
        self._priorities = priorities[kept]
        tokens = x if self.tokens is None else torch.cat([self.tokens, x])
        self.tokens = tokens[kept.to(x.device)]

    @property
    def is_empty(self) -> bool:
        """Whether no token was observed."""
        return self.tokens is None

    def merge(self, other: TokenSample) -> None:
        """Add the sample of later tokens, which have other numbers."""
        if other.tokens is not None:
            self._keep(other.tokens, other._priorities)

    def tensors(self) -> State:
        """Return the tokens and their priorities."""
        return self.tokens, self._priorities

    def set_tensors(self, tensors: State) -> None:
        """Replace the tokens and their priorities."""
        self.tokens, priorities = tensors
        assert priorities is not None
        self._priorities = priorities


class InputSample:
    """A sample of the tokens (``TokenSample``), and the range of each channel over all tokens.

    Args:
        size: Number of tokens to keep.
        start: Number of the first token.
    """

    def __init__(self, size: int, start: int = 0) -> None:
        self.range = ChannelRange()
        self._sample = TokenSample(size, start)

    def __call__(self, x: torch.Tensor) -> None:
        """Observe (tokens, channels)."""
        self.range(x)
        self._sample(x)

    @property
    def is_empty(self) -> bool:
        """Whether no token was observed."""
        return self._sample.is_empty

    def merge(self, other: InputSample) -> None:
        """Add the sample of later tokens, which have other numbers."""
        self.range.merge(other.range)
        self._sample.merge(other._sample)

    def tensors(self) -> State:
        """Return the tensors of the range and of the sample."""
        return *self.range.tensors(), *self._sample.tensors()

    def set_tensors(self, tensors: State) -> None:
        """Replace the range and the sample."""
        self.range.set_tensors(tensors[:2])
        self._sample.set_tensors(tensors[2:])

    @property
    def tokens(self) -> torch.Tensor:
        """(tokens, channels): up to ``size``."""
        assert self._sample.tokens is not None
        return self._sample.tokens

    def rescale_(self, factors: torch.Tensor) -> None:
        """Change the sample to that of inputs divided by ``factors`` (channels,)."""
        assert self.range.lo is not None and self.range.hi is not None
        for x in (self.tokens, self.range.lo, self.range.hi):
            x.div_(factors)
