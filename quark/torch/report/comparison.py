"""Models side by side: sizes, predictions on the same text, continuations, errors of weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quark import __version__
from quark.torch.evaluation.predictions import Predictions
from quark.torch.report.measurement import measure
from quark.torch.report.text import Text


@dataclass(frozen=True)
class Continuation:
    """What a model writes after a prompt.

    Attributes:
        text: The new text.
        tokens_per_second: Speed of its generation, one token at a time.
    """

    text: str
    tokens_per_second: float


@dataclass(frozen=True)
class ComparedModel:
    """One model of a comparison.

    Attributes:
        directory: Its path, or its name on the Hub.
        schemes: Quantized tensors of its layers in words; "" for a float model.
        bytes: Bytes on disk of its tensors.
        bits_per_weight: Bits of a quantized weight, scales included; None for a float model.
        predictions: Its predictions on the text; without figures of differences for the first.
        seconds: Time that the text took.
        routers: Share of the experts that the routers of the original choose too, by layer.
        continuation: What it writes after the prompt; None if nothing was asked for.
        tasks: Task -> metric -> (value, standard error), of lm-evaluation-harness.
        weight_errors: Layer -> norm of the rounding error of its weight, as a share of the norm of
            the weight; None where the weight is another one. Empty if they were not compared.
    """

    directory: str
    schemes: str
    bytes: int
    bits_per_weight: float | None
    predictions: Predictions
    seconds: float
    routers: Mapping[str, float] = field(default_factory=dict)
    continuation: Continuation | None = None
    tasks: Mapping[str, Mapping[str, tuple[float, float | None]]] = field(default_factory=dict)
    weight_errors: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Models side by side; the first is what the others are compared with.

    Attributes:
        text: Text that they were run on.
        prompt: Text that they continue, "" for none.
        models: The models.
    """

    text: Text
    prompt: str
    models: list[ComparedModel]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        data = {"quark": __version__, **asdict(self)}
        for model, row in zip(self.models, data["models"], strict=True):
            row["predictions"]["change"] = model.predictions.change
        return data


@torch.inference_mode()
def continue_text(model: Any, tokenizer: Any, tokens: torch.Tensor, count: int) -> Continuation:
    """Return what a model writes after a prompt, choosing the most probable token each time.

    Args:
        model: A model of Transformers that generates.
        tokenizer: Its tokenizer.
        tokens: Token identifiers of the prompt, (1, length).
        count: Maximum number of new tokens.
    """
    tokens = tokens.to(next(model.parameters()).device)
    options = {
        "attention_mask": torch.ones_like(tokens),
        "do_sample": False,
        "pad_token_id": tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
    }
    model.generate(tokens, max_new_tokens=1, **options)  # what happens once is not measured
    start = time.perf_counter()
    written = model.generate(tokens, max_new_tokens=count, **options)[0, tokens.shape[1] :].cpu()
    seconds = time.perf_counter() - start
    return Continuation(tokenizer.decode(written, skip_special_tokens=True), len(written) / seconds)


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
