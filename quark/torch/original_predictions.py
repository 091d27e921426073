"""The predictions of the original model, which a finish learns, kept while there is room."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quark.torch.graph.residency import release, residency_of
from quark.torch.pipeline.activation_store import current_limit
from quark.torch.pipeline.batches import run_batch


class OriginalPredictions:
    """The logits of the original for sequences that are asked for again and again.

    Those of the first sequences are kept in main memory, as many as the limit of activations has
    room for.

    Args:
        original: The float model.
    """

    def __init__(self, original: nn.Module) -> None:
        self._original = original
        residency = residency_of(original)
        self._room = current_limit() if residency is None else residency.activation_limit
        self._kept: dict[int, tuple[Any, torch.Tensor, torch.device]] = {}  # by id of the sequence

    def keeps(self, sequence: Any) -> bool:
        """Whether the logits for a sequence are there, so that the original does not run."""
        return id(sequence) in self._kept

    @torch.no_grad()
    def of(self, sequence: Any) -> torch.Tensor:
        """Return the logits for a sequence; an original that is read in parts leaves the memory.

        Raises:
            ValueError: The model returns no logits.
        """
        if self.keeps(sequence):
            logits, device = self._kept[id(sequence)][1:]
            return logits.to(device)
        logits = logits_of(run_batch(self._original, sequence))
        release(self._original)
        if logits.nbytes <= self._room:
            self._room -= logits.nbytes
            # With the sequence, so that no other one gets its id.
            self._kept[id(sequence)] = sequence, logits.cpu(), logits.device
        return logits


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in the output of a model.

    Raises:
        ValueError: There are none.
    """
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(
            f"distill: the model returns {type(output).__name__} without logits, which are "
            "compared. Leave the finish out."
        )
    return logits
