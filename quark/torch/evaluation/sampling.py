"""Text that a model writes itself, to calibrate it with.

Each sequence begins with a random token and goes on with tokens drawn from the predictions of the
model (LLM-QAT, Liu et al. 2023, arXiv 2305.17888). So it has the languages and kinds of text that
the model was trained on, in about the shares that it would write them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quark.torch.evaluation.next_token import why_no_next_token
from quark.torch.graph.eval_mode import eval_mode
from quark.torch.graph.float_products import float_products
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.data_source import vocabulary_size
from quark.torch.progress import show_progress

BATCH = 16  # sequences that are written at a time
SEEDS = 1 << 32  # different seeds of the random numbers of torch


def check_writes_text(model: nn.Module) -> None:
    """Check that a model can write text in a sensible time.

    Raises:
        TypeError: It does not predict the next token.
        ValueError: Its parameters are read in parts: each token would read all of them.
    """
    name, can_write = type(model).__name__, getattr(model, "can_generate", lambda: False)
    reason = why_no_next_token(model)
    if reason or not can_write():
        raise TypeError(f"{name} {reason or 'predicts no next token'}, so it writes no text.")
    if residency_of(model) is not None:
        raise ValueError(
            f"{name} is read in parts, since memory does not hold it, and each token would read "
            "all of it. Let a smaller model of its family write the text."
        )


@torch.no_grad()
def sample_sequences(
    model: nn.Module, count: int, length: int, seed: int = 0
) -> Iterator[torch.Tensor]:
    """Yield sequences of tokens that a model writes, (up to ``BATCH``, length) int64 each.

    A sequence depends on its number and the seed, and on no other sequence, up to errors of
    rounding in the predictions.

    Args:
        model: A model of Transformers that predicts the next token.
        count: Number of sequences.
        length: Tokens of a sequence, at least 2.
        seed: Seed of the random numbers, 0 to 2³² - 1.

    Raises:
        TypeError: See ``check_writes_text``.
        ValueError: Likewise; or the length or the seed is not in its range, or the model has no
            vocabulary; or predictions are not finite.
    """
    from transformers import GenerationConfig, LogitsProcessorList

    check_writes_text(model)
    words = vocabulary_size(model)
    if length < 2 or words is None or not 0 <= seed < SEEDS:
        raise ValueError(
            f"expected a length of at least 2, a vocabulary and a seed below 2^32, got "
            f"length={length}, {words} tokens and seed={seed}."
        )
    random = torch.Generator().manual_seed(seed)
    # Nothing but the length ends a sequence, and none has padding.
    settings = GenerationConfig(
        max_new_tokens=length - 1, do_sample=False, pad_token_id=0, use_cache=True
    )
    device = next(model.parameters()).device
    for start in show_progress(range(0, count, BATCH), "sampling text"):
        seeds = torch.randint(
            SEEDS, (min(BATCH, count - start),), generator=random, device="cpu"
        ).tolist()
        draws = [torch.Generator().manual_seed(own) for own in seeds]
        first = [torch.randint(words, (1, 1), generator=draw, device="cpu") for draw in draws]
        tokens = torch.cat(first).to(device)
        drawing = LogitsProcessorList([_Draw(draws)])
        with eval_mode(model), float_products(), _plain_generation(model) as writer:
            written = writer.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=settings,
                logits_processor=drawing,
            )
        yield written.cpu()


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[Any]:
    """Let a model write what it predicts, without settings of its own, such as penalties."""
    from transformers import GenerationConfig

    writer: Any = model
    own, writer.generation_config = writer.generation_config, GenerationConfig()
    try:
        yield writer
    finally:
        writer.generation_config = own


class _Draw:
    """Leaves one token of each sequence, drawn from its predictions.

    Args:
        draws: Source of random numbers for each sequence.
    """

    def __init__(self, draws: list[torch.Generator]) -> None:
        self._draws = draws

    def __call__(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return logits that are finite for the drawn tokens only, (sequences, words)."""
        numbers = [
            torch.rand(1, generator=draw, dtype=torch.float64, device="cpu") for draw in self._draws
        ]
        cumulative = logits.double().softmax(-1).cumsum(-1)
        if not bool(cumulative[:, -1].isfinite().all()):
            raise ValueError("the predictions of the model are not finite numbers.")
        at = torch.stack(numbers).to(logits.device) * cumulative[:, -1:]
        # A number just below 1 may be rounded to the end of the last interval.
        drawn = torch.searchsorted(cumulative, at, right=True).clamp_(max=logits.shape[1] - 1)
        return torch.full_like(logits, -torch.inf).scatter_(1, drawn, 0.0)
