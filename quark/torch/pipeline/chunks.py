"""Calibration data in fixed chunks, whatever the batches in which it comes.

Sums of floats depend on the shapes of the tensors and on the order of the terms. So data is cut
into the same chunks for every batch size, and the model runs once for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from quark.torch.pipeline.batches import (
    batch_values,
    count_sequences,
    flatten_batches,
    join_sequences,
    split_sequences,
)
from quark.torch.pipeline.processes import processes
from quark.torch.pipeline.reducer import Leaves

SEQUENCES = 64  # most sequences of a chunk
TOKENS = 2048  # most tokens of a chunk of several sequences
VALUES = 512  # floats of an image or an embedding that count as a token


class Chunks:
    """Calibration data in chunks, which can be iterated any number of times.

    A chunk holds consecutive sequences with the same arguments and shapes, up to a fixed number of
    sequences and of tokens. Batches that ``split_sequences`` cannot split are chunks of their own.
    So are sequences with several tensors of which one has more than two axes: patches of images
    are not always in the order of the sequences.

    Example: batches of 3, 3 and 1 sequences of 512 tokens are chunks of 4 and 3 sequences; so are
    one batch of 7 and seven batches of 1.

    Args:
        batches: Batches that can be iterated any number of times.
        sequences: Most sequences of a chunk.
        tokens: Most tokens of a chunk of several sequences.
    """

    def __init__(
        self, batches: Iterable[Any], sequences: int = SEQUENCES, tokens: int = TOKENS
    ) -> None:
        self._batches = batches
        self._sequences, self._tokens = sequences, tokens
        self._count: int | None = None

    def __iter__(self) -> Iterator[Any]:
        part: list[Any] = []
        size, kind = 0, None
        for sequence in split_sequences(self._batches):
            tokens, own = _count_tokens(sequence), _kind(sequence)
            is_full = len(part) == self._sequences or size + tokens > self._tokens
            if part and (is_full or own is None or own != kind):
                yield join_sequences(part)
                part, size = [], 0
            part.append(sequence)
            size, kind = size + tokens, own
        if part:
            yield join_sequences(part)

    def __len__(self) -> int:
        """Return the number of chunks. The first call reads all batches."""
        if self._count is None:
            self._count = sum(1 for _ in self)
        return self._count


def count_calls(batches: Iterable[Any]) -> int:
    """Return how often the model is called for all batches."""
    if isinstance(batches, Chunks):
        return len(batches)
    return sum(1 for _ in flatten_batches(batches))


def count_tokens(chunk: Any) -> tuple[int, int]:
    """Return the tokens of a chunk, and those of each of its sequences."""
    length = _count_tokens(chunk)
    return length * (count_sequences(chunk) or 1), length


def own_calls(batches: Iterable[Any]) -> Callable[[int], bool]:
    """Return whether a batch belongs to this process, given its number in the data."""
    return Leaves(count_calls(batches)).is_own if processes().count > 1 else lambda number: True


def _kind(sequence: Any) -> Any:
    """Return what sequences of one chunk have in common; None for a chunk of its own."""
    tensors = [x for x in batch_values(sequence) if isinstance(x, torch.Tensor) and x.dim()]
    is_plain = len(tensors) == 1 or all(x.dim() == 2 for x in tensors)
    if count_sequences(sequence) is None or not is_plain:
        return None
    names = list(sequence) if hasattr(sequence, "items") else type(sequence)
    return names, [_kind_of_value(value) for value in batch_values(sequence)]


def _kind_of_value(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value), value
    shape = value.shape[1:] if value.dim() else value.item()
    return value.dtype, value.device, shape


def _count_tokens(sequence: Any) -> int:
    """Return the size of a sequence in tokens; floats of more than two axes count by ``VALUES``."""
    tensors = [x for x in batch_values(sequence) if isinstance(x, torch.Tensor) and x.dim() > 1]
    sizes = (x.shape[1] if x.dim() == 2 else -(-x.numel() // VALUES) for x in tensors)
    return max(sizes, default=0)


def tokens_of_chunk(length: int) -> int:
    """Return the most tokens of a chunk of sequences of one length."""
    return length * max(1, min(SEQUENCES, TOKENS // length))
