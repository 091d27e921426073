"""The numbers of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quark import __version__
from quark.torch.evaluation.predictions import Predictions
from quark.torch.evaluation.scripts import describe_uncovered
from quark.torch.report.advice import Worst
from quark.torch.report.continuation import Continuation
from quark.torch.report.layer import Layer
from quark.torch.report.remedies import Remedy
from quark.torch.report.storage import FloatPart, Kind
from quark.torch.report.unseen_inputs import UnseenInputs


@dataclass(frozen=True)
class Text:
    """Text that the model was run on.

    Attributes:
        source: Its name.
        windows: Number of windows.
        tokens: Tokens of a window.
        scripts: Script to its share of the letters; empty if it is not known.
        calibrated: The same of the text that the checkpoint was calibrated on.
    """

    source: str
    windows: int
    tokens: int
    scripts: Mapping[str, float] = field(default_factory=dict)
    calibrated: Mapping[str, float] = field(default_factory=dict)


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

    def with_scripts(self, scripts: Mapping[str, float]) -> Report:
        """Return the report with the scripts of its text, and which of them calibration lacked.

        Args:
            scripts: Result of ``script_shares`` for the text that the model was run on.
        """
        if self.text is None:
            return self
        said = describe_uncovered(self.text.calibrated, scripts)
        text = replace(self.text, scripts=dict(scripts))
        return replace(self, text=text, verdict=[*self.verdict, *([said] if said else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        found = {"quark": __version__, **asdict(self)}
        for data, layer in zip(found["layers"], self.layers, strict=True):
            data |= {"bits_per_weight": layer.bits_per_weight, "shape": list(layer.shape)}
            for part in (p for p in ("values", "original") if data[p] is not None):
                data[part]["peak"] = getattr(layer, part).peak
        found["algorithms"] = list(self.algorithms)
        return found
