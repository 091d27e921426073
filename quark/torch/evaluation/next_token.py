"""Models that perplexity is defined for: those that predict the next token of a text."""

from __future__ import annotations

import sys

from torch import nn


def check_next_token(model: nn.Module) -> None:
    """Check that a model may predict the next token, as far as its class tells.

    Raises:
        ValueError: It does not.
    """
    reason = why_no_next_token(model)
    if reason:
        raise ValueError(
            f"{type(model).__name__} {reason}: perplexity is defined for decoders. Leave the "
            "evaluation out."
        )


def why_no_next_token(model: nn.Module) -> str:
    """Return the reason why a model does not predict the next token, "" if it may do so."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "is an encoder-decoder, which reads the tokens that it is asked to predict"
    if _fills_masks(model):
        return "predicts masked tokens, and reads those on both sides of them"
    return ""


def _fills_masks(model: nn.Module) -> bool:
    """Whether Transformers lists the class of a model for masked tokens, and not for the next."""
    if "transformers" not in sys.modules:
        return False
    from transformers.models.auto import modeling_auto

    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    name = type(model).__name__
    return name in masked and name not in causal
