"""Store of activations between blocks: in memory up to a limit, then on disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from quark.torch.pipeline.temporary_directory import TemporaryDirectory

LIMIT = 1 << 30  # bytes held in memory
_CHUNK = 1 << 20  # bytes that are written at once
_directory: ContextVar[Path | None] = ContextVar("directory", default=None)
_limit: ContextVar[int] = ContextVar("limit", default=LIMIT)


@contextmanager
def activation_limit(limit: int | None) -> Iterator[None]:
    """Bound the bytes of activations that passes over a model hold in memory, while this is open.

    Args:
        limit: The bytes; None for the bound that is in force.
    """
    token = _limit.set(_limit.get() if limit is None else limit)
    try:
        yield
    finally:
        _limit.reset(token)


def current_limit() -> int:
    """Return the bytes of activations that a pass over a model may hold in memory."""
    return _limit.get()


@contextmanager
def offload_directory(path: str | Path | None) -> Iterator[None]:
    """Put activations that do not fit into memory below a directory, for as long as this is open.

    Args:
        path: The directory; None for that of temporary files.

    Raises:
        NotADirectoryError: There is no such directory.
        OSError: Nothing can be written to it.
    """
    if path is None:
        yield
        return
    if not Path(path).is_dir():
        raise NotADirectoryError(f"offload_dir: {path} is no directory. Make it first.")
    with tempfile.TemporaryFile(dir=path):
        pass
    token = _directory.set(Path(path))
    try:
        yield
    finally:
        _directory.reset(token)


class _File(NamedTuple):
    """A tensor in a file."""

    path: str
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def stride(self) -> tuple[int, ...]:
        """Return the distances of neighbours along each axis."""
        return self.strides

    def allocate(self) -> None:
        """Give the file its space on the disk: a mapped file without it ends the process.

        Raises:
            OSError: The disk is full.
        """
        size = self.shape.numel() * self.dtype.itemsize
        try:
            with Path(self.path).open("wb") as file:
                _allocate(file.fileno(), size)
        except OSError as error:
            Path(self.path).unlink(missing_ok=True)
            place = Path(self.path).parent.parent
            needed, free = (f"{n / 1e6:.1f} MB" for n in (size, shutil.disk_usage(place).free))
            raise OSError(
                error.errno,
                f"{place} has no room for activations ({error.strerror}; {needed} needed, "
                f"{free} free). Choose a larger disk with "
                "offload_dir (--offload_dir), or give less calibration data",
            ) from None

    def open(self) -> torch.Tensor:
        """Return the tensor, mapped to memory while it is in use."""
        size = self.shape.numel()
        flat = torch.from_file(self.path, True, size, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides)


class ActivationStore:
    """Tensors by number, in host memory and, above a limit, in files of a temporary directory.

    Args:
        limit: Bytes to hold in memory.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.tensors: dict[int, torch.Tensor | _File] = {}
        self.devices: dict[int, torch.device] = {}
        self._places: dict[int, torch.Tensor | _File] = {}  # reserved
        self._size = 0
        self._directory: TemporaryDirectory | None = None
        self._numbers = count()  # of files: none is written anew while a tensor maps it

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
        """Store a copy of ``x``. A tensor of the same shape and type is overwritten in place.

        The order of axes in memory stays, by which convolutions choose how they round.
        """
        self.devices[index] = x.device
        old = self.tensors.get(index, self._places.pop(index, None))
        strides = torch.empty_like(x, device="meta").stride()
        if old is None or (old.shape, old.dtype, old.stride()) != (x.shape, x.dtype, strides):
            self._remove(old)
            old = self._make(x.shape, x.dtype, strides)
        self.tensors[index] = old
        self._read(index).copy_(x)

    def reserve(self, other: ActivationStore) -> None:
        """Take memory and disk space for tensors like those of another store, before they come.

        Raises:
            OSError: The disk is full.
        """
        for index, like in other.tensors.items():
            if index not in self.tensors and index not in self._places:
                self._places[index] = self._make(like.shape, like.dtype, like.stride())

    def recycle(self) -> None:
        """Remove all tensors, and keep their places for the next ones."""
        self._places |= self.tensors
        self.tensors.clear()

    def clear(self) -> None:
        """Remove all tensors and files."""
        self.tensors.clear()
        self._places.clear()
        self._size = 0
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _read(self, index: int) -> torch.Tensor:
        held = self.tensors[index]
        return held.open() if isinstance(held, _File) else held

    def _remove(self, held: torch.Tensor | _File | None) -> None:
        """Remove the file of a tensor that another one replaces."""
        if isinstance(held, _File):
            # Windows removes no file while a tensor maps it: that of the directory does.
            with suppress(PermissionError):
                Path(held.path).unlink()

    def _make(
        self, shape: torch.Size, dtype: torch.dtype, strides: tuple[int, ...]
    ) -> torch.Tensor | _File:
        size = shape.numel() * dtype.itemsize
        if self._size + size <= self.limit or not size:
            self._size += size
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        if self._directory is None:
            self._directory = TemporaryDirectory("quark-activations-", _directory.get())
        file = _File(str(self._directory.path / str(next(self._numbers))), shape, strides, dtype)
        file.allocate()
        return file


def _allocate(handle: int, size: int) -> None:
    """Take disk space for an open, empty file: by the system, or by writing zeros."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            return
    zeros = memoryview(bytes(min(size, _CHUNK)))
    while size:
        size -= os.write(handle, zeros[:size])
