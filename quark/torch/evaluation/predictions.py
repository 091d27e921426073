"""Predictions of models on the same windows of text, compared with those of an original.

All figures have standard errors over windows. The change of the perplexity is paired: its error is
that of the differences between both models, window by window::

    windows            1      2      3
    original        2.10   3.40   2.70    nats per token
    quantized       2.13   3.44   2.73
    difference      0.03   0.04   0.03    mean 0.033 ± 0.003, while each model has ± 0.38
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.divergence import kl_divergence
from quark.torch.evaluation.perplexity import window_loss_steps
from quark.torch.pipeline.activation_store import ActivationStore
from quark.torch.pipeline.interleaved_passes import Steps, complete
from quark.torch.quantization.nn.router_choices import RouterChoices

POSITIONS = 64  # positions of a window at which predictions are compared


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model, compared with those of the original.

    Attributes:
        perplexity: Perplexity of the model.
        error: Standard error of ``perplexity``; None with one window, like the errors below.
        original: Perplexity of the original, None without one.
        change_error: Standard error of ``perplexity / original``, paired over windows.
        kl: Mean over positions of KL(original ‖ model), nats.
        kl_error: Standard error of ``kl``.
        agreement: Share of positions where the top-1 predictions agree.
        agreement_error: Standard error of ``agreement``.
        positions: Number of positions that were compared.
    """

    perplexity: float
    error: float | None = None
    original: float | None = None
    change_error: float | None = None
    kl: float | None = None
    kl_error: float | None = None
    agreement: float | None = None
    agreement_error: float | None = None
    positions: int = 0

    @property
    def change(self) -> float | None:
        """Relative change of the perplexity, None without an original."""
        return None if self.original is None else self.perplexity / self.original - 1


def standard_error(values: torch.Tensor) -> float | None:
    """Return the standard error of the mean of independent values, (count,); None of one value."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None


def positions_of(length: int, most: int = POSITIONS) -> int:
    """Return at how many positions of a window of ``length`` tokens predictions are compared.

    Args:
        length: Tokens of a window.
        most: As ``positions`` of ``Reference``.
    """
    return -(-length // _step(length, most))


def _step(length: int, positions: int) -> int:
    return max(1, length // positions)


class Reference:
    """Predictions of the original model, stored to compare others with.

    Models run one after the other, and the predictions of the original stay in the store. Or they
    take turns (``pipeline.interleaved_passes``): the original pauses where the predictions fill the
    memory of the store, and they are dropped once all others were compared with them.

    Args:
        store: Store for log-probabilities.
        positions: About the number of positions of a window at which predictions are compared.

    Attributes:
        predictions: Predictions of the original; None if it did not run.
        agreement: Result of ``RouterChoices.agreement`` with the model that was compared last.
    """

    def __init__(self, store: ActivationStore, positions: int = POSITIONS) -> None:
        self.predictions: Predictions | None = None
        self._positions = positions
        self.agreement: dict[str, float] = {}
        self._losses = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._choices = RouterChoices()
        self._kept = _Kept(store)

    def run(
        self,
        model: nn.Module,
        windows: torch.Tensor,
        batch_size: int,
        title: str = "original",
        observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Run the original on windows of tokens, (windows, length).

        Args:
            model: The original.
            windows: Token identifiers.
            batch_size: Windows that run together.
            title: Title of the progress bar.
            observe: See ``window_losses``.
        """
        complete(self.run_steps(model, windows, batch_size, title, observe))

    def run_steps(
        self,
        model: nn.Module,
        windows: torch.Tensor,
        batch_size: int,
        title: str = "original",
        observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Steps[Predictions]:
        """Return a pass of the original that takes turns with others; see ``run``."""
        kept = self._kept
        take = _Sample(_step(windows.shape[1], self._positions), kept.add)
        with self._choices.record(model):
            self._losses = yield from window_loss_steps(
                model, windows, batch_size, title, 1, take, observe, kept.is_full
            )
        self.predictions = describe_losses(self._losses)
        return self.predictions

    def compare(
        self,
        model: nn.Module,
        windows: torch.Tensor,
        batch_size: int,
        observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
        title: str = "quantized",
    ) -> Predictions:
        """Run a model on the same windows, in the same batches, and compare its predictions."""
        return complete(self.compare_steps(model, windows, batch_size, observe, title))

    def compare_steps(
        self,
        model: nn.Module,
        windows: torch.Tensor,
        batch_size: int,
        observe: Callable[[], AbstractContextManager[Any]] = nullcontext,
        title: str = "quantized",
    ) -> Steps[Predictions]:
        """Return a pass of another model that takes turns with the original; see ``compare``."""
        divergences = _Divergences(self._kept, len(windows))
        take = _Sample(_step(windows.shape[1], self._positions), divergences.add)
        choices = RouterChoices()
        with choices.record(model):
            losses = yield from window_loss_steps(
                model, windows, batch_size, title, 1, take, observe, divergences.is_even
            )
        self.agreement = self._choices.agreement(choices)
        if self.predictions is None:
            return describe_losses(losses)
        kl = divergences.sums / divergences.counts
        return replace(
            compare_losses(losses, self._losses),
            kl=float(kl.mean()),
            kl_error=standard_error(kl),
            agreement=float(divergences.same.sum() / divergences.counts.sum()),
            agreement_error=standard_error(divergences.same / divergences.counts),
            positions=int(divergences.counts.sum()),
        )

    def drop_predictions(self) -> None:
        """Forget predictions that all other models were compared with: a new round begins."""
        self._kept.clear()


def describe_losses(losses: torch.Tensor) -> Predictions:
    """Return the perplexity of a model, with its error, given its losses.

    Args:
        losses: Nats per token of each window, (windows,).
    """
    perplexity, error = float(losses.mean().exp()), standard_error(losses)
    return Predictions(perplexity, None if error is None else error * perplexity)


def compare_losses(losses: torch.Tensor, original: torch.Tensor) -> Predictions:
    """Return the perplexity of a model beside that of the original on the same windows.

    Args:
        losses: Nats per token of each window, (windows,).
        original: Those of the original.
    """
    result, other = describe_losses(losses), describe_losses(original)
    error = standard_error(losses - original)
    scale = result.perplexity / other.perplexity
    return replace(
        result,
        original=other.perplexity,
        change_error=None if error is None else error * scale,
    )


class _Kept:
    """Log-probabilities of the original, part by part, that others are compared with.

    Args:
        store: Where they are.

    Attributes:
        round: Number of times that they were dropped.
    """

    def __init__(self, store: ActivationStore) -> None:
        self.store, self.round = store, 0
        self._bytes = self._batches = 0

    def add(self, first: int, log_probs: torch.Tensor) -> None:
        """Add positions of windows from ``first`` on, (windows, positions, vocabulary) float32."""
        self.store[len(self.store)] = log_probs
        self._bytes += log_probs.nbytes

    def is_full(self) -> bool:
        """Whether memory has no room for another batch, asked for after each batch."""
        self._batches += 1
        return self._bytes * (self._batches + 1) > self.store.limit * self._batches

    def clear(self) -> None:
        """Drop them all."""
        self.store.recycle()
        self.round += 1
        self._bytes = self._batches = 0


class _Divergences:
    """Divergences of a model from kept predictions, summed over the positions of windows.

    Args:
        kept: Predictions of the original; those of another model come in the same parts.
        windows: Number of windows.
    """

    def __init__(self, kept: _Kept, windows: int) -> None:
        self._kept = kept
        self._round = self._part = 0
        self.sums, self.counts, self.same = torch.zeros(
            3, windows, dtype=torch.float64, device="cpu"
        )

    def add(self, first: int, log_probs: torch.Tensor) -> None:
        """Add positions of windows from ``first`` on, (windows, positions, vocabulary) float32."""
        store = self._kept.store
        if self._round < self._kept.round:
            self._round, self._part = self._kept.round, 0
        if not len(store):  # no original ran
            return
        expected = store[self._part].to(log_probs.device)
        self._part += 1
        part = slice(first, first + len(log_probs))
        self.sums[part] += kl_divergence(expected, log_probs).sum(-1)
        is_same = expected.argmax(-1) == log_probs.argmax(-1)
        self.same[part] += is_same.sum(-1).cpu()
        self.counts[part] += log_probs.shape[1]

    def is_even(self) -> bool:
        """Whether all kept predictions were compared."""
        return 0 < len(self._kept.store) == self._part


class _Sample:
    """Receives the logits of parts of batches, and passes on log-probabilities at some positions.

    Args:
        step: Distance of these positions.
        take: Receives the number of the first window of a part, and log-probabilities,
            (windows, positions, vocabulary) float32.
    """

    def __init__(self, step: int, take: Callable[[int, torch.Tensor], None]) -> None:
        self._step, self._take = step, take
        self._begin = self._end = 0  # windows of the current batch

    def __call__(self, first: int, logits: torch.Tensor) -> None:
        if first == 0:
            self._begin, self._end = self._end, self._end + len(logits)
        some = logits[:, -first % self._step :: self._step]
        if some.shape[1]:
            self._take(self._begin, some.float().log_softmax(-1))
