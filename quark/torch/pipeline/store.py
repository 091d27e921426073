"""Where activations wait between blocks: in memory up to a limit, then on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

import torch

LIMIT = 1 << 30  # bytes held in memory


class ActivationStore:
    """Tensors by number, in host memory and, above a limit, in files of a temporary directory.

    Args:
        limit: Bytes to hold in memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.held: dict[int, torch.Tensor] = {}
        self.places: dict[int, torch.device] = {}
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
        return len(self.held)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a tensor on the device it came from."""
        return self.held[index].to(self.places[index])

    def __setitem__(self, index: int, x: torch.Tensor) -> None:
        """Keep a copy of ``x``; another of the same size takes the place of an earlier one."""
        self.places[index] = x.device
        old = self.held.get(index)
        if old is None or old.shape != x.shape or old.dtype != x.dtype:
            old = self.held[index] = self._make(index, x)
        old.copy_(x)

    def clear(self) -> None:
        """Forget everything and remove the files."""
        self.held.clear()
        self._size = 0
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _make(self, index: int, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() * x.element_size()
        if self._size + size <= self.limit or not size:
            self._size += size
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(
                prefix="quark-activations-", ignore_cleanup_errors=True
            )
        path = Path(self._directory.name) / str(index)
        mapped = torch.from_file(str(path), shared=True, size=x.numel(), dtype=x.dtype)
        return mapped.view(x.shape)
