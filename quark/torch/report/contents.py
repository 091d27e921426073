"""The numbers of a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quark import __version__
from quark.torch.evaluation.predictions import Predictions
from quark.torch.report.advice import Worst
from quark.torch.report.continuation import Continuation
from quark.torch.report.layer import Layer
from quark.torch.report.remedies import Remedy
from quark.torch.report.storage import FloatPart, Kind
from quark.torch.report.unseen_inputs import UnseenInputs


@dataclass(frozen=True)
class Text:
    """Text that the model was run on: its source, number of windows, and tokens of a window."""

    source: str
    windows: int
    tokens: int


@dataclass(frozen=True)
class Report:
    """Measurements of a quantized checkpoint.

    Attributes:
        directory: Path of the checkpoint.
        original: Path of the original, "" without one.
        model_type: Architecture, as ``config.json`` names it.
        method: Layout of the checkpoint.
        algorithms: Algorithms that the checkpoint names.
        bytes: Bytes of its tensors.
        original_bytes: Bytes of the tensors of the original, None without one.
        text: Text that the model was run on, None without data.
        predictions: Predictions on that text.
        verdict: Summary in sentences.
        advice: Changes that can lower the loss, the best first; none if the loss is known to be
            hardly measurable.
        worst: The layers with the largest errors.
        kinds: Totals of all layers of one kind.
        layers: The quantized layers in the order of the model.
        floats: Modules that are not quantized, with reasons.
        experts: Tokens that reached each expert, by layer of experts; none without data.
        routers: Share of the experts that the routers of the original choose too, mean over
            tokens, by layer of experts; none without data or original.
        unseen: Inputs that calibration hardly saw; None without its statistics.
        prompt: Text that the models continue, "" for none.
        continuations: Text and speed of the continuation of each model: ``original`` and
            ``quantized``.
    """

    directory: str
    original: str
    model_type: str
    method: str
    algorithms: tuple[str, ...]
    bytes: int
    original_bytes: int | None
    text: Text | None
    predictions: Predictions | None
    verdict: list[str]
    advice: list[Remedy]
    worst: list[Worst]
    kinds: list[Kind]
    layers: list[Layer]
    floats: list[FloatPart]
    experts: dict[str, list[int]]
    routers: dict[str, float]
    unseen: UnseenInputs | None
    prompt: str
    continuations: dict[str, Continuation]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        found = {"quark": __version__, **asdict(self)}
        for data, layer in zip(found["layers"], self.layers, strict=True):
            data |= {"bits_per_weight": layer.bits_per_weight, "shape": list(layer.shape)}
            for part in (p for p in ("values", "original") if data[p] is not None):
                data[part]["peak"] = getattr(layer, part).peak
        found["algorithms"] = list(self.algorithms)
        return found
