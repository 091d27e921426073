"""Sequences of random tokens beside calibration data.

The inputs of layers have little energy in many directions on one kind of text. Solvers move errors
into these directions, and text of another kind has inputs there. Random tokens take every row of
the embedding alike, so that errors cost something in all directions that the model uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from quark.torch.pipeline.batches import split_sequences
from quark.torch.pipeline.data_source import vocabulary_size

_TOKENS, _MASK = "input_ids", "attention_mask"
_INTEGERS = (torch.int64, torch.int32)  # that embeddings take


class WithRandomSequences:
    """Calibration data with sequences of random tokens between its own, for any iterations.

    A random sequence has the shape and the mask of the sequence before it. Its tokens depend on the
    number of that sequence alone.

    Example: a share of 0.25 of the sequences a, b, c, d, e -> a, random, b, c, d, e, random.

    Args:
        batches: Batches of tokens, (sequences, tokens) int64 each or mappings of ``input_ids`` and
            ``attention_mask``, which can be iterated any number of times.
        share: Random sequences for each sequence of the data, above 0, at most 1.
        model: The model, which embeds the tokens.

    Raises:
        ValueError: The model does not embed tokens, or a batch holds something else.
    """

    def __init__(self, batches: Iterable[Any], share: float, model: nn.Module) -> None:
        words = vocabulary_size(model)
        if words is None or not all(map(_has_tokens, split_sequences(batches))):
            raise ValueError(
                "random_tokens adds sequences of tokens, so it needs a model that embeds tokens, "
                f"and batches with nothing but {_TOKENS} and {_MASK}. Leave it out for other data."
            )
        self._batches, self._share, self._words = batches, share, words

    def __iter__(self) -> Iterator[Any]:
        for number, sequence in enumerate(split_sequences(self._batches)):
            yield sequence
            if math.ceil((number + 1) * self._share) > math.ceil(number * self._share):
                yield self._replace(sequence, number)

    def _replace(self, sequence: Any, number: int) -> Any:
        """Return a sequence with random tokens in place of its own."""
        tokens = sequence if isinstance(sequence, torch.Tensor) else sequence[_TOKENS]
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randint(self._words, tokens.shape, generator=generator)
        drawn = drawn.to(tokens.device, tokens.dtype)
        return drawn if isinstance(sequence, torch.Tensor) else {**sequence, _TOKENS: drawn}


def _has_tokens(sequence: Any) -> bool:
    """Whether a sequence holds tokens, (1, tokens), and nothing else but their mask."""
    tokens = sequence
    if hasattr(sequence, "items"):
        tokens = sequence.get(_TOKENS) if sequence.keys() <= {_TOKENS, _MASK} else None
    return isinstance(tokens, torch.Tensor) and tokens.dim() == 2 and tokens.dtype in _INTEGERS
