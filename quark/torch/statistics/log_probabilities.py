"""Log-probabilities that a model gives to the tokens of a call, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.output_head import OutputHead
from quark.torch.pipeline.batches import padding_mask, run_batch

Receive = Callable[[torch.Tensor], None]  # takes log-probabilities, (tokens, classes) float32


def predict(model: nn.Module, call: Any) -> torch.Tensor:
    """Return the log-probabilities of a call, (tokens, classes) float32, without padding.

    Raises:
        ValueError: The model returns no logits.
    """
    return log_probs(logits_of(model, call), padding_mask(call))


def predict_parts(model: nn.Module, call: Any, head: OutputHead | None, receive: Receive) -> None:
    """Compute the log-probabilities of a call in parts, without padding.

    The output head of a language model runs on a few tokens at a time. Predictions of other models
    are one part.

    Args:
        model: The model.
        call: Data of the call.
        head: The output head of the model; None if it does not predict each token of a sequence.
        receive: Takes the log-probabilities of successive parts.

    Raises:
        ValueError: The model returns no logits.
    """
    tokens, mask = _tokens(call), padding_mask(call)
    if head is None or tokens is None:
        receive(predict(model, call))
        return

    def take(first: int, logits: torch.Tensor) -> None:
        part = None if mask is None else mask[:, first : first + logits.shape[1]]
        receive(log_probs(logits, part))

    head.run(partial(run_batch, model, call), tokens, take)


def _tokens(call: Any) -> torch.Tensor | None:
    """Return the tokens that a call predicts, (sequences, length); None if that is not known."""
    tokens = call
    if hasattr(call, "get"):
        tokens = None if "decoder_input_ids" in call else call.get("input_ids")
    is_grid = isinstance(tokens, torch.Tensor) and tokens.dim() == 2
    return tokens if is_grid and not tokens.is_floating_point() else None


def log_probs(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the log-probabilities of tokens that are no padding, (tokens, classes) float32."""
    rows = logits.flatten(0, -2)
    own = rows if mask is None else rows[mask.flatten().to(rows.device)]
    return own.float().log_softmax(-1)


def logits_of(model: nn.Module, call: Any) -> torch.Tensor:
    """Return the logits of a call, (…, classes); ``ValueError`` if the model returns none."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        run_batch(model, call)
    finally:
        handle.remove()
    output = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} returned {type(output).__name__} without logits, which "
            "sensitivities are measured on. A search needs a model with a head. Other statistics "
            "need no sensitivities: probes=0 (quark collect --probes 0)."
        )
    return logits
