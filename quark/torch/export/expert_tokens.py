"""Tokens that calibration sent to the experts of a model."""

from __future__ import annotations

import logging
from statistics import median
from typing import NamedTuple

from torch import nn

from quark.torch.quantization.nn.linear_experts import LinearExperts

FEW = 0.1  # of the median of a layer: warn about experts with fewer tokens

logger = logging.getLogger(__name__)


class ExpertTokens(NamedTuple):
    """Tokens that calibration sent to the experts of a model.

    Attributes:
        experts: Number of experts.
        least: Tokens of the expert with the fewest.
        median: Median over all experts.
        unseen: Names of experts without tokens.
        scarce: Names of experts with less than a tenth of the median of their layer.
    """

    experts: int
    least: int
    median: float
    unseen: list[str]
    scarce: list[str]

    def __str__(self) -> str:
        text = f"{self.least} at least, median {self.median:g}"
        return text + (f", none for {len(self.unseen)} of {self.experts}" * bool(self.unseen))


def expert_tokens(model: nn.Module) -> ExpertTokens | None:
    """Return the tokens that calibration sent to experts; None without experts or data."""
    layers = {n: m.tokens for n, m in model.named_modules() if isinstance(m, LinearExperts)}
    seen = {
        f"{name}.{index}": (count, FEW * median(tokens))
        for name, tokens in layers.items()
        if tokens
        for index, count in enumerate(tokens)
    }
    if not seen:
        return None
    counts = [count for count, _ in seen.values()]
    return ExpertTokens(
        len(seen),
        min(counts),
        median(counts),
        [name for name, (count, _) in seen.items() if not count],
        [name for name, (count, few) in seen.items() if 0 < count < few],
    )


def report_experts(model: nn.Module) -> None:
    """Warn about experts that saw no tokens in calibration, or few."""
    found = expert_tokens(model)
    if found is None:
        return
    for names, what in (
        (found.unseen, "no token at all"),
        (found.scarce, "less than a tenth of the tokens that others beside them got"),
    ):
        if names:
            logger.warning(
                "%d of %d experts got %s in calibration: %s%s. Calibrate with more data.",
                len(names),
                found.experts,
                what,
                ", ".join(names[:5]),
                " …" * (len(names) > 5),
            )
