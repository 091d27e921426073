"""Models side by side: sizes, predictions on the same text, continuations, errors of weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quark import __version__
from quark.torch.evaluation.predictions import Predictions
from quark.torch.report.contents import Text
from quark.torch.report.continuation import Continuation
from quark.torch.report.measurement import measure
from quark.torch.report.speed import Speed


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison.

    Attributes:
        directory: Its path, or its name on the Hub.
        name: What tables and charts call it; see ``short_names``.
        schemes: Quantized tensors of its layers in words; "" for a float model.
        bytes: Bytes on disk of its tensors.
        bits_per_weight: Bits of a quantized weight, scales included; None for a float model.
        predictions: Its predictions on the text; without figures of differences for the first.
        seconds: Time that the text took.
        routers: Share of the experts that the routers of the original choose too, by layer.
        continuation: What it writes after the prompt; None if nothing was asked for.
        speed: Its speed and memory in a process of its own; None if they were not measured.
        tasks: Task -> metric -> (value, standard error), of lm-evaluation-harness.
        weight_errors: Layer -> norm of the rounding error of its weight, as a share of the norm of
            the weight; None where the weight is another one. Empty if they were not compared.
    """

    directory: str
    name: str
    schemes: str
    bytes: int
    bits_per_weight: float | None
    predictions: Predictions
    seconds: float
    routers: Mapping[str, float] = field(default_factory=dict)
    continuation: Continuation | None = None
    speed: Speed | None = None
    tasks: Mapping[str, Mapping[str, tuple[float, float | None]]] = field(default_factory=dict)
    weight_errors: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Models side by side; the first is what the others are compared with.

    Attributes:
        text: Text that they were run on.
        prompt: Text that they continue, "" for none.
        models: The models.
        runtime: How quantized layers compute: ``exact``, or another value of ``--runtime``.
    """

    text: Text
    prompt: str
    models: list[ComparedModel]
    runtime: str = "exact"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        data = {"quark": __version__, **asdict(self)}
        for model, row in zip(self.models, data["models"], strict=True):
            row["predictions"]["change"] = model.predictions.change
        return data


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the last part of each path, by path; the whole path where two end alike."""
    ends = {path: re.split(r"[/\\]", path.rstrip("/\\"))[-1] for path in paths}
    count = Counter(ends.values())
    return {path: end if end and count[end] == 1 else path for path, end in ends.items()}


def weight_errors(
    directory: Path, original: Path, trust_remote_code: bool, max_memory: int | None
) -> dict[str, float | None]:
    """Return the error of the weight of each quantized layer; see ``ComparedModel``.

    Raises:
        ValueError: The original is another model.
    """
    report = measure(
        directory, original, trust_remote_code=trust_remote_code, max_memory=max_memory
    )
    return {x.name: None if x.error is None else x.error.relative for x in report.layers}
