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
    from quark.torch.search.mixtures import Mixture
    from quark.torch.search.sizes import Size

ORIGINAL, MIXTURE = "the original", "the mixture"  # titles of measurements
TOLERANCE = 0.005  # relative difference of sizes that count as equal


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


@dataclass(frozen=True)
class Row:
    """The mixture, or one format for all layers.

    Attributes:
        name: Name of the format, or ``mixed``.
        bits_per_weight: Bits of a weight, scales included; of a weight that a token reads if sizes
            are those.
        bytes: Size of the checkpoint.
        bytes_per_token: Size of the weights that a token reads.
        loss: Predicted loss, nats per token.
        perplexity: Measured perplexity, None if it was not measured.
    """

    name: str
    bits_per_weight: float
    bytes: int
    bytes_per_token: int
    loss: float
    perplexity: float | None


@dataclass(frozen=True)
class Result:
    """A mixture beside one format for all layers.

    Attributes:
        sizes: These, the smallest first.
        original_perplexity: Perplexity of the float model, None without text.
        routers: Share of the experts that routers of the mixture choose like the original, by
            layer; empty without experts.
    """

    sizes: list[Row]
    original_perplexity: float | None
    routers: Mapping[str, float]


def measure_result(
    mixture: Mixture, chosen: Mapping[str, str], outside: Size, measure: Measure
) -> Result:
    """Measure a mixture, and the largest format for all layers that is not larger."""
    from quark.torch.search.sizes import size_of_mixture

    original = measure.perplexity(ORIGINAL)
    mixed, rows = mixture.cost(chosen), mixture.uniform()
    fitting = [name for name, (bits, _) in rows.items() if bits <= mixed[0] * (1 + TOLERANCE)]
    rival = max(fitting, key=lambda name: rows[name][0], default=None)
    measured = {"mixed": measure.perplexity(MIXTURE, chosen)}
    if rival is not None:
        measured[rival] = measure.perplexity(rival, dict.fromkeys(chosen, rival))
    ordered = sorted({**rows, "mixed": mixed}.items(), key=lambda row: row[1])
    formats = {name: dict.fromkeys(chosen, name) for name in rows} | {"mixed": chosen}
    sizes = [
        Row(
            name,
            bits,
            *size_of_mixture(mixture.units, formats[name], outside),
            loss,
            measured.get(name),
        )
        for name, (bits, loss) in ordered
    ]
    choices = [measure.choices[title] for title in (ORIGINAL, MIXTURE) if title in measure.choices]
    routers = choices[0].agreement(choices[1]) if len(choices) == 2 else {}
    return Result(sizes, original, routers)
