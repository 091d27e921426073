"""Sequences of random tokens beside calibration data.

The inputs of layers have little energy in many directions on one kind of text. Solvers move errors
into these directions, and text of another kind has inputs there. Random tokens take every row of
the embedding alike, so that errors cost something in all directions that the model uses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from quark.torch.pipeline.batches import split_sequences
from quark.torch.pipeline.data_source import vocabulary_size

logger = logging.getLogger(__name__)

_TOKENS = ("input_ids", "decoder_input_ids")
_INTEGERS = (torch.int64, torch.int32)  # that embeddings take


def add_random_sequences(batches: Iterable[Any], share: float, model: nn.Module) -> Iterable[Any]:
    """Return calibration data with sequences of random tokens between its own.

    A sequence with other inputs than tokens and masks, such as images, is followed by none; a
    warning says so.

    Args:
        batches: Batches that can be iterated any number of times.
        share: Random sequences for each sequence of the data, above 0, at most 1.
        model: The model, which embeds the tokens.
    """
    words, sequences = vocabulary_size(model), list(map(_has_tokens, split_sequences(batches)))
    if words is None or not any(sequences):
        logger.warning("random_tokens has no effect: the data is not of tokens.")
        return batches
    if not all(sequences):
        logger.warning(
            "random_tokens: %d of %d sequences hold more than tokens. No random ones follow them.",
            sequences.count(False),
            len(sequences),
        )
    return _WithRandomSequences(batches, share, words)


class _WithRandomSequences:
    """Calibration data with sequences of random tokens, for any number of iterations.

    A random sequence has the shape and the mask of the sequence before it. Its tokens depend on the
    number of that sequence alone.

    Example: a share of 0.25 of the sequences a, b, c, d, e -> a, random, b, c, d, e, random.

    Args:
        batches: The data.
        share: Random sequences for each sequence of the data.
        words: Number of tokens that the model embeds.
    """

    def __init__(self, batches: Iterable[Any], share: float, words: int) -> None:
        self._batches, self._share, self._words = batches, share, words

    def __iter__(self) -> Iterator[Any]:
        for number, sequence in enumerate(split_sequences(self._batches)):
            yield sequence
            is_due = math.ceil((number + 1) * self._share) > math.ceil(number * self._share)
            if is_due and _has_tokens(sequence):
                yield self._replace(sequence, number)

    def _replace(self, sequence: Any, number: int) -> Any:
        """Return a sequence with random tokens in place of its own."""
        if not isinstance(sequence, torch.Tensor):
            names = [name for name in _TOKENS if name in sequence]
            return {**sequence, **{n: self._replace(sequence[n], number) for n in names}}
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randint(self._words, sequence.shape, generator=generator, device="cpu")
        return drawn.to(sequence.device, sequence.dtype)


def _has_tokens(sequence: Any) -> bool:
    """Whether a sequence holds tokens, (1, tokens), and nothing else but masks."""
    if not hasattr(sequence, "items"):
        return _is_tokens(sequence)
    names = [name for name in sequence if not name.endswith("mask")]
    known = names and all(name in _TOKENS for name in names)
    return bool(known) and all(_is_tokens(sequence[name]) for name in names)


def _is_tokens(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 2 and x.dtype in _INTEGERS
