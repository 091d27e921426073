"""Store of activations between blocks: in memory up to a limit, then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

LIMIT = 1 << 30  # bytes held in memory


class _File(NamedTuple):
    """A tensor in a file."""

    path: str
    shape: torch.Size
    dtype: torch.dtype

    def open(self) -> torch.Tensor:
        """Return the tensor, mapped to memory while it is in use."""
        size = self.shape.numel()
        return torch.from_file(self.path, True, size, dtype=self.dtype).view(self.shape)


class ActivationStore:
    """Tensors by number, in host memory and, above a limit, in files of a temporary directory.

    Args:
        limit: Bytes to hold in memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.tensors: dict[int, torch.Tensor | _File] = {}
        self.devices: dict[int, torch.device] = {}
        self._size = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a tensor on its original device."""
        return self._read(index).to(self.devices[index])

    def __setitem__(self, index: int, x: torch.Tensor) -> None:
        """Store a copy of ``x``. A tensor of the same shape and type is overwritten in place."""
        self.devices[index] = x.device
        old = self.tensors.get(index)
        if old is None or old.shape != x.shape or old.dtype != x.dtype:
            self.tensors[index] = self._make(index, x)
        self._read(index).copy_(x)

    def clear(self) -> None:
        """Remove all tensors and files."""
        self.tensors.clear()
        self._size = 0
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _read(self, index: int) -> torch.Tensor:
        held = self.tensors[index]
        return held.open() if isinstance(held, _File) else held

    def _make(self, index: int, x: torch.Tensor) -> torch.Tensor | _File:
        size = x.numel() * x.element_size()
        if self._size + size <= self.limit or not size:
            self._size += size
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(
                prefix="quark-activations-", ignore_cleanup_errors=True
            )
        return _File(str(Path(self._directory.name) / str(index)), x.shape, x.dtype)
