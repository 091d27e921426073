"""Observers that search the scale of each block of a weight, to minimize the squared error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from quark.torch.numerics.exponents import power_of_two, shared_exponent
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import CHUNK, QParams, fake_quantize_
from quark.torch.numerics.scale_formats import FLOAT32, POF2
from quark.torch.numerics.scales import largest_exponent, qparams_from_range, round_qparams
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.observer.observer import HasScheme, ObserverBase

COARSE = 20  # steps of the first search, down to a fifth of the range
FINE = 8  # steps of the second search, around the best of the first

# Squared error of each row of values under candidate scales.
_Error = Callable[[QParams], torch.Tensor]


class SearchObserver(ObserverBase):
    """Tries scales for each block and keeps the best.

    A weight is observed once; another tensor replaces the result.
    """

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.result: QParams | None = None

    def candidates(
        self, scheme: Scheme, lo: torch.Tensor, hi: torch.Tensor, error: _Error
    ) -> Iterator[QParams]:
        """Iterate over scales and zero points to try for rows of values within [lo, hi].

        Args:
            scheme: How a row is quantized.
            lo: Smallest value of each row.
            hi: Largest value of each row.
            error: Squared error of each row under a candidate, for searches in steps.
        """
        raise NotImplementedError

    def observe(self, x: torch.Tensor) -> None:
        """Search the scales of ``x``; an empty tensor changes nothing.

        Raises:
            FloatingPointError: NaN or infinity was observed.
        """
        if x.numel() == 0:
            return
        if not bool(torch.isfinite(torch.stack(x.aminmax())).all()):
            raise FloatingPointError("NaN or infinite values were observed.")
        blocks = self.scheme.blocks(x.shape)
        view = blocks.split(x)
        kept = [i for i in range(view.dim()) if i not in blocks.reduced]
        rows = view.permute(*kept, *blocks.reduced)
        count = 1
        for i in kept:
            count *= view.shape[i]
        shape = self.scheme.scale_shape(x.shape)
        scale, offset = self.search(rows.reshape(count, -1), shape)
        self.result = scale.to(self.device), None if offset is None else offset.to(self.device)

    def search(self, rows: torch.Tensor, shape: Sequence[int]) -> QParams:
        """Return the best scales and zero points, in the types in which they are stored.

        Args:
            rows: Values, (blocks, elements).
            shape: Shape of the scales, which has as many elements as there are blocks.
        """
        to = self.scheme.scale
        scheme = replace(
            self.scheme,
            qscheme=QSchemeType.per_channel,
            axis=0,
            per_token=False,
            scale=FLOAT32 if to.span else to,  # super-blocks are made of the best scales
        )
        height = max(1, CHUNK // rows.shape[1])
        parts = [self._best(piece.float(), scheme) for piece in torch.split(rows, height)]
        scale = torch.cat([part[0] for part in parts]).reshape(tuple(shape))
        zeros = [part[1] for part in parts if part[1] is not None]
        offset = torch.cat(zeros).reshape(tuple(shape)) if zeros else None
        return round_qparams(scale, offset, self.scheme)

    def _best(self, rows: torch.Tensor, scheme: Scheme) -> QParams:
        lo, hi = rows.amin(1), rows.amax(1)

        def error(qparams: QParams) -> torch.Tensor:
            rounded = fake_quantize_(rows.clone(), *qparams, scheme)
            return rounded.sub_(rows).square_().sum(1)

        best: QParams | None = None
        least = torch.full_like(lo, torch.inf)
        for candidate in self.candidates(scheme, lo, hi, error):
            loss = error(candidate)
            better = loss < least
            least = torch.minimum(least, loss)
            best = candidate if best is None else _choose(better, candidate, best)
        assert best is not None
        return best

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been observed yet."""
        return self.result is None

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the best scales and zero points.

        Raises:
            RuntimeError: Nothing was observed.
        """
        if self.result is None:
            raise RuntimeError("No data was observed, so there is no range to derive a scale from.")
        return self.result

    def reset(self) -> None:
        """Clear the result."""
        self.result = None


def _choose(which: torch.Tensor, one: QParams, other: QParams) -> QParams:
    zero_point = one[1]
    if zero_point is not None and other[1] is not None:
        zero_point = torch.where(which, zero_point, other[1])
    return torch.where(which, one[0], other[0]), zero_point


def widest_range(scheme: Scheme) -> float:
    """Return the widest range to try, relative to the range of the values.

    Symmetric integers have one code less above zero. The range of int4 has 15 steps, so that of
    [-1, 1] has a scale of 2 / 15, and 1 is cut to 7 · 2 / 15 = 0.93. A scale of 1 / 7 cuts nothing:
    15 / 14 of the range.
    """
    fmt = scheme.fmt
    if fmt.is_float or not scheme.symmetric or -fmt.qmin <= fmt.qmax:
        return 1.0
    return (fmt.qmax - fmt.qmin) / (2 * fmt.qmax)


class PerChannelMSEObserver(SearchObserver):
    """Scales the range of each block to minimize the squared error."""

    def candidates(
        self, scheme: Scheme, lo: torch.Tensor, hi: torch.Tensor, error: _Error
    ) -> Iterator[QParams]:
        """Iterate over the whole range, and ranges near the best of those down to a fifth."""
        step, widest = 0.8 / COARSE, widest_range(scheme)
        yield qparams_from_range(lo, hi, scheme, None, self.largest)
        best, least = torch.ones_like(lo), torch.full_like(lo, torch.inf)
        for i in range(COARSE + 1):
            shrink = widest - i * step
            candidate = qparams_from_range(lo * shrink, hi * shrink, scheme, None, self.largest)
            loss = error(candidate)
            best = torch.where(loss < least, shrink, best)
            least = torch.minimum(least, loss)
        for i in range(-FINE // 2, FINE // 2 + 1):
            shrinks = (best + 2 * i * step / (FINE + 2)).clamp(max=widest)
            yield qparams_from_range(lo * shrinks, hi * shrinks, scheme, None, self.largest)


class PerGroupMSEObserver(PerChannelMSEObserver):
    """``PerChannelMSEObserver`` for groups."""


class PerTensorPowOf2MinMSEObserver(SearchObserver):
    """Chooses the power-of-two scale of least squared error from five around the nearest."""

    def __init__(self, qspec: HasScheme, device: torch.device | None = None) -> None:
        super().__init__(qspec, device)
        self.scheme = replace(self.scheme, scale=POF2)

    def candidates(
        self, scheme: Scheme, lo: torch.Tensor, hi: torch.Tensor, error: _Error
    ) -> Iterator[QParams]:
        """Iterate over the nearest power of two and its multiples by 1/4, 1/2, 2 and 4."""
        for factor in (1.0, 0.5, 2.0, 0.25, 4.0):
            yield qparams_from_range(lo * factor, hi * factor, scheme, None, self.largest)


class PerChannelPowOf2MinMSEObserver(PerTensorPowOf2MinMSEObserver):
    """``PerTensorPowOf2MinMSEObserver`` for channels."""


class PerBlockMXDiffsObserver(SearchObserver):
    """Chooses the shared exponent of least squared error: rounded up, or one less."""

    def candidates(
        self, scheme: Scheme, lo: torch.Tensor, hi: torch.Tensor, error: _Error
    ) -> Iterator[QParams]:
        """Iterate over both exponents."""
        top = shared_exponent(torch.maximum(-lo, hi), scheme.fmt, "ceil")
        for exponent in (top, (top - 1).clamp(min=-127)):
            most = largest_exponent(scheme.fmt, self.largest)
            step = (exponent - scheme.fmt.fraction_bits).clamp(max=most)
            yield power_of_two(step), None
