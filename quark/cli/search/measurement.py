"""The perplexity of mixtures of formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quark.cli import console

if TYPE_CHECKING:
    import torch
    from torch import nn

    from quark.torch.evaluation.predictions import Predictions, Reference
    from quark.torch.pipeline.activation_store import ActivationStore
    from quark.torch.pipeline.statistics import Statistics
    from quark.torch.quantization.config.config import Config
    from quark.torch.search.loss_curve import LossCurve
    from quark.torch.search.mixtures import Mixture
    from quark.torch.search.sizes import Size
    from quark.torch.search.times import Seconds

ORIGINAL, MIXTURE = "the original", "the mixture"  # titles of measurements
TOLERANCE = 0.005  # relative difference of sizes that count as equal


@dataclass(frozen=True)
class Measured:
    """A mixture that ran beside the original.

    Attributes:
        predictions: Its predictions, compared with those of the original.
        routers: See ``Result``.
    """

    predictions: Predictions
    routers: Mapping[str, float]


@dataclass(frozen=True)
class Measure:
    """Measures mixtures with weights rounded to the nearest, beside the original on the same text.

    A mixture is measured once.

    Attributes:
        windows: Token identifiers, (windows, length); None if nothing is measured.
        reference: Keeps the predictions of the original.
    """

    model: nn.Module
    statistics: Statistics
    windows: torch.Tensor | None
    configure: Callable[[Mapping[str, str]], Config]
    reference: Reference
    _done: dict[tuple[tuple[str, str], ...], Measured] = field(default_factory=dict, init=False)

    def original(self) -> Predictions | None:
        """Return the predictions of the float model, which runs once; None without text."""
        from quark.torch.evaluation.perplexity import BATCH_SIZE

        if self.windows is not None and self.reference.predictions is None:
            with console.stage(f"perplexity of {ORIGINAL}"):
                self.reference.run(self.model, self.windows, BATCH_SIZE, ORIGINAL)
        return self.reference.predictions

    def mixture(self, title: str, chosen: Mapping[str, str]) -> Measured | None:
        """Measure a mixture beside the original; None without text."""
        from quark.torch.evaluation.perplexity import BATCH_SIZE
        from quark.torch.search.mixtures import temporarily_quantized

        if self.windows is None or self.original() is None:
            return None
        key = tuple(sorted(chosen.items()))
        if key not in self._done:
            rounding = temporarily_quantized(self.model, self.configure(chosen), self.statistics)
            with console.stage(f"perplexity of {title}"), rounding:
                found = self.reference.compare(self.model, self.windows, BATCH_SIZE, title=title)
            self._done[key] = Measured(found, self.reference.agreement)
        return self._done[key]


def curve_of(
    mixture: Mixture,
    chosen: Mapping[str, str],
    measure: Measure,
    store: ActivationStore,
    solved: bool,
) -> LossCurve:
    """Return the curve that corrects predicted losses, through mixtures measured on a few windows.

    It also passes through the chosen mixture, measured on all windows. Nothing is corrected without
    text, and where losses are those of GPTQ, since mixtures are measured with weights rounded to
    the nearest.

    Args:
        mixture: The best mixtures of all sizes.
        chosen: Format of each layer in the chosen one, by the name of the layer.
        measure: Measures mixtures on all windows.
        store: For predictions of the original on the few windows.
        solved: Whether losses are those of GPTQ.
    """
    from quark.torch.evaluation.predictions import Reference
    from quark.torch.search.loss_curve import (
        POSITIONS,
        LossCurve,
        curve_windows,
        measure_curve,
    )
    from quark.torch.search.sizes import stored_bits_per_weight

    if measure.windows is None or solved:
        return LossCurve()
    known = (mixture.cost(chosen)[1], _divergence(measure, MIXTURE, chosen))
    few = curve_windows(measure.windows)
    if len(few) < len(measure.windows):
        measure = replace(measure, windows=few, reference=Reference(store, POSITIONS))

    def divergence(formats: Mapping[str, str]) -> float:
        bits = stored_bits_per_weight(mixture.units, formats)
        return _divergence(measure, f"{bits:.2f} bits", formats)

    return measure_curve(mixture, divergence, known)


def _divergence(measure: Measure, title: str, chosen: Mapping[str, str]) -> float:
    measured = measure.mixture(title, chosen)
    assert measured is not None and measured.predictions.kl is not None
    return measured.predictions.kl


@dataclass(frozen=True)
class Row:
    """The mixture, or one format for all layers.

    Attributes:
        name: Name of the format, or ``mixed``.
        bits_per_weight: Bits of a quantized weight in the files, scales included.
        bytes: Size of the checkpoint.
        bytes_per_token: Size of the weights that a token reads.
        milliseconds: Of a token in the layers that get formats; None if they were not measured.
        loss: Predicted divergence from the original, nats per token.
        divergence: Measured divergence, KL(original ‖ mixture); None if it was not measured.
        perplexity: Measured perplexity, None if it was not measured.
    """

    name: str
    bits_per_weight: float
    bytes: int
    bytes_per_token: int
    milliseconds: float | None
    loss: float
    divergence: float | None
    perplexity: float | None


@dataclass(frozen=True)
class Result:
    """A mixture beside one format for all layers.

    Attributes:
        sizes: These, by the size that the search limits, the smallest first.
        original_perplexity: Perplexity of the float model, None without text.
        routers: Share of the experts that routers of the mixture choose like the original, by
            layer; empty without experts.
    """

    sizes: list[Row]
    original_perplexity: float | None
    routers: Mapping[str, float]


def measure_result(
    mixture: Mixture,
    chosen: Mapping[str, str],
    outside: Size,
    measure: Measure,
    curve: LossCurve,
    seconds: Seconds | None,
) -> Result:
    """Measure a mixture, and the largest format for all layers that is not larger.

    Args:
        mixture: The best mixtures of all sizes.
        chosen: Format of each layer, by its name.
        outside: Size of what is not quantized.
        measure: Measures mixtures.
        curve: Corrects predicted losses.
        seconds: Those of a token in each layer, by format; None if they were not measured.
    """
    from quark.torch.search.sizes import size_of_mixture, stored_bits_per_weight
    from quark.torch.search.times import time_of

    original = measure.original()
    mixed, rows = mixture.cost(chosen), mixture.uniform()
    fitting = [name for name, (bits, _) in rows.items() if bits <= mixed[0] * (1 + TOLERANCE)]
    rival = max(fitting, key=lambda name: rows[name][0], default=None)
    measured = {"mixed": (found := measure.mixture(MIXTURE, chosen))}
    routers = {} if found is None else found.routers
    if rival is not None:
        measured[rival] = measure.mixture(rival, dict.fromkeys(chosen, rival))
    ordered = sorted({**rows, "mixed": mixed}.items(), key=lambda row: row[1])
    formats = {name: dict.fromkeys(chosen, name) for name in rows} | {"mixed": chosen}
    sizes = []
    for name, (_, loss) in ordered:
        bits = stored_bits_per_weight(mixture.units, formats[name])
        size, found = size_of_mixture(mixture.units, formats[name], outside), measured.get(name)
        time = None if seconds is None else 1e3 * time_of(mixture.units, seconds, formats[name])
        ran = None if found is None else found.predictions
        figures = (None, None) if ran is None else (ran.kl, ran.perplexity)
        sizes.append(Row(name, bits, *size, time, curve(loss), *figures))
    return Result(sizes, None if original is None else original.perplexity, routers)
