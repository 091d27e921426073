"""Reading ahead: a thread reads the values of the next unit while the one before is worked on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from quark.torch.graph.alignment import aligned
from quark.torch.numerics.finite import check_finite

_PINNED = ("cuda", "xpu")  # devices that copy from pinned memory while they compute


class Source(Protocol):
    """The values of the parameters of a model, by the names that they had when it was built."""

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the values of parameters, on the CPU, in their types.

        Raises:
            ValueError: A file is damaged.
        """
        ...


class ReadAhead:
    """Values of one unit that a thread reads before they are asked for.

    Args:
        source: Where they are read from.
        device: Where they will be brought to.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._pins = source, device.type in _PINNED
        self._thread: ThreadPoolExecutor | None = None
        self._values: Future[dict[str, torch.Tensor]] | None = None
        self._names: frozenset[str] = frozenset()

    def begin(self, names: Sequence[str]) -> None:
        """Read tensors by the thread; those of an earlier call that were not taken are dropped."""
        self.drop()
        if names:
            self._thread = self._thread or ThreadPoolExecutor(1, "read-ahead")
            self._names = frozenset(names)
            self._values = self._thread.submit(self._read, list(names))

    def take(self, name: str) -> torch.Tensor | None:
        """Return a tensor, and forget it; None if it was not read ahead.

        Its values are finite.

        Raises:
            ValueError: A file is damaged, or values are not finite.
        """
        if self._values is None or name not in self._names:
            return None
        return self._values.result().pop(name, None)

    def drop(self) -> None:
        """Wait for the thread, and forget what it has read."""
        if self._values is not None and not self._values.cancel():
            self._values.exception()
        self._values, self._names = None, frozenset()

    @torch.no_grad()
    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        values = self._source.read(names)
        for name, tensor in list(values.items()):
            check_finite(name, tensor)  # this reads the pages of a mapped file too
            values[name] = tensor.pin_memory() if self._pins else aligned(tensor)
        return values
