"""The perplexity of mixtures of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.pipeline.statistics import Statistics
    from quark.torch.quantization.config.config import Config
    from quark.torch.quantization.nn.router_choices import RouterChoices

ORIGINAL, MIXTURE = "the original", "the mixture"  # titles of measurements


@dataclass(frozen=True)
class Measure:
    """Measures mixtures with weights rounded to the nearest.

    Attributes:
        choices: The experts that routers chose, by title of the last such measurement.
    """

    model: nn.Module
    statistics: Statistics
    windows: torch.Tensor | None
    configure: Callable[[Mapping[str, str]], Config]
    choices: dict[str, RouterChoices] = field(default_factory=dict)

    def perplexity(self, title: str, chosen: Mapping[str, str] | None = None) -> float | None:
        """Return the perplexity of a mixture, or of the float model; None without text."""
        from quark.torch.evaluation.perplexity import perplexity
        from quark.torch.quantization.nn.router_choices import RouterChoices
        from quark.torch.search.mixtures import temporarily_quantized

        if self.windows is None:
            return None
        rounding: AbstractContextManager[None] = nullcontext()
        if chosen is not None:
            rounding = temporarily_quantized(self.model, self.configure(chosen), self.statistics)
        self.choices[title] = RouterChoices()
        with (
            console.stage(f"perplexity of {title}"),
            rounding,
            self.choices[title].record(self.model),
        ):
            return perplexity(self.model, self.windows, progress=title)
