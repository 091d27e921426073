"""Biases of zeros that AutoGPTQ stores for layers without a bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def without_zero_biases(reader: Any, model: nn.Module) -> Any:
    """Return a reader without the biases of zeros that linear layers of a model do not have.

    Other biases that the model does not have stay, and are an error where tensors are checked.

    Args:
        reader: Reader of the checkpoint, with the names of the model.
        model: The float model.
    """
    without = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is None]
    biases = [key for name in without if (key := f"{name}.bias") in reader.entries]
    hidden = {key for key in biases if not reader.tensor(key).any()}
    return _Reader(reader, hidden) if hidden else reader


class _Reader:
    """Tensors of another reader, without some of them."""

    def __init__(self, reader: Any, hidden: set[str]) -> None:
        self._reader, self._hidden = reader, hidden
        self.entries = {key: e for key, e in reader.entries.items() if key not in hidden}

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        tensor: torch.Tensor = self._reader.tensor(key)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        for key, tensor in self._reader.tensors():
            if key not in self._hidden:
                yield key, tensor
