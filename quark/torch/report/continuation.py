"""Continuation of a prompt by a model, and its speed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Continuation:
    """What a model writes after a prompt.

    Attributes:
        text: The new text.
        tokens_per_second: Speed of its generation, one token at a time; None if
            it was not measured.
    """

    text: str
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class Prompt:
    """Text that models continue.

    Attributes:
        tokens: Token identifiers, (1, length).
        tokenizer: Tokenizer of the models.
        new_tokens: Largest length of a continuation.
        repetition_penalty: See Transformers; small models repeat themselves at 1.
    """

    tokens: torch.Tensor
    tokenizer: Any
    new_tokens: int
    repetition_penalty: float = 1.0

    @property
    def text(self) -> str:
        """The text to continue."""
        return str(self.tokenizer.decode(self.tokens[0], skip_special_tokens=True))

    @torch.inference_mode()
    def answer(self, model: Any) -> Continuation:
        """Return what a model of Transformers writes, the most probable token each time."""
        tokens = self.tokens.to(next(model.parameters()).device)
        end = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
        options = {
            "attention_mask": torch.ones_like(tokens),
            "do_sample": False,
            "repetition_penalty": self.repetition_penalty,
            "pad_token_id": end,
        }
        model.generate(tokens, max_new_tokens=1, **options)  # what happens once is not measured
        start = time.perf_counter()
        output = model.generate(tokens, max_new_tokens=self.new_tokens, **options)
        written = output[0, tokens.shape[1] :].cpu()
        seconds = time.perf_counter() - start
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return Continuation(text, len(written) / seconds)
