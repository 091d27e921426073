"""Summary of a report in sentences, and the layers with the largest errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quark.torch.evaluation.predictions import Predictions
from quark.torch.report.layer import Layer
from quark.torch.report.storage import FloatPart

WORST = 5
FEW_WINDOWS = 8  # from here on a standard error is known to about a quarter
# Increase of perplexity -> what to call it.
_GRADES = ((0.01, "hardly measurable"), (0.03, "a small loss"), (0.1, "a noticeable loss"))
# Layers are ranked by the first of these that is known.
_MEASURES: dict[str, Callable[[Layer], float | None]] = {
    "output error": lambda layer: layer.output_error,
    "weight error": lambda layer: None if layer.error is None else layer.error.relative,
    "outliers": lambda layer: layer.values.peak,
}


@dataclass(frozen=True)
class Worst:
    """One of the layers with the largest errors.

    Attributes:
        name: Full name of the layer.
        measure: Figure that it is ranked by: ``output error``, ``weight error`` or ``outliers``.
        value: The figure: a share of the norm, or for outliers a ratio to the root mean square.
    """

    name: str
    measure: str
    value: float


def _compared(original: float, size: float) -> str:
    if size <= original:
        return f"{original / size:.1f} times smaller than"
    return f"{size / original:.1f} times as large as"


def verdict(
    size: int,
    original: int | None,
    predictions: Predictions | None,
    layers: Sequence[Layer],
    floats: Sequence[FloatPart],
) -> list[str]:
    """Return a few sentences on the size and accuracy of a quantized model.

    Args:
        size: Bytes of the checkpoint.
        original: Bytes of the original, None if it is not known.
        predictions: What the models predict, None without data.
        layers: The quantized layers.
        floats: Modules that are not quantized.
    """
    weights, bits = sum(x.weights for x in layers), 8 * sum(x.bytes for x in layers)
    count = weights + sum(x.parameters for x in floats)
    said = [
        f"{len(layers)} layers with {weights / count:.0%} of the parameters are quantized, to "
        f"{bits / weights:.2f} bits per weight."
    ]
    if original is not None:
        said.insert(0, f"The model is {_compared(original, size)} the original.")
    if predictions is None:
        said.append("The effect on predictions was not measured: give --dataset.")
    elif predictions.original is None or predictions.agreement is None:
        said.append("The original was not measured: give --original to compare with it.")
    else:
        said.append(
            f"Perplexity changes by {_describe_change(predictions)}. The top-1 predictions agree "
            f"on {predictions.agreement:.1%}{_error(predictions.agreement_error)} of tokens."
        )
    moved = sum(x.error is not None and x.error.change == "other" for x in layers)
    if moved:
        said.append(
            f"{moved} layers cannot be compared with the original one by one: their weights were "
            "rotated, or come from another model."
        )
    return said


def _describe_change(predictions: Predictions) -> str:
    """Return the change of the perplexity in words, with all grades within two standard errors."""
    change, error = predictions.change, predictions.change_error
    assert change is not None
    if error is None:
        return f"{change:+.1%} in one window of text; more windows (--limit) show how certain it is"
    least, most = _grade(change - 2 * error), _grade(change + 2 * error)
    words = least if least == most else f"{least} or {most}, which a larger --limit can tell apart"
    return f"{change:+.1%} ± {error:.1%}: {words}"


def few_windows(windows: int) -> str:
    """Return a warning that standard errors are uncertain themselves; "" for enough windows.

    The standard deviation of n normal values has the relative standard error 1/√(2(n − 1)).
    """
    if windows >= FEW_WINDOWS:
        return ""
    if windows == 1:
        return "One window of text gives no standard errors. Use longer text or a larger --limit."
    share = (2 * (windows - 1)) ** -0.5
    return (
        f"Only {windows} windows of text: each standard error (±) is itself uncertain by about "
        f"{share:.0%}. Use longer text or a larger --limit."
    )


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.1%}"


def _grade(change: float) -> str:
    return next((words for most, words in _GRADES if change < most), "a severe loss")


def is_harmless(predictions: Predictions | None) -> bool:
    """Whether the loss is hardly measurable, even two standard errors above the change."""
    if predictions is None or predictions.change is None or predictions.change_error is None:
        return False
    return _grade(predictions.change + 2 * predictions.change_error) == _GRADES[0][1]


def worst_layers(layers: Sequence[Layer]) -> list[Worst]:
    """Return the layers with the largest errors, the worst first.

    Layers are ranked by output error; if that is unknown, by weight error, then by outliers.
    """
    return [Worst(x.name, measure, value) for measure, value, x in ranked(layers)[:WORST]]


def ranked(layers: Sequence[Layer]) -> list[tuple[str, float, Layer]]:
    """Return the layers that can be ranked, the worst first: measure, value, layer."""
    rows: list[tuple[str, float, Layer]] = []
    for measure, figure in _MEASURES.items():
        rows = [(measure, value, x) for x in layers if (value := figure(x)) is not None]
        if rows:
            break
    return sorted(rows, key=lambda row: -row[1])
