"""Files of a checkpoint: safetensors in shards, and the native format, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quark.torch.export.checkpoint.file_versions import check_version
from quark.torch.export.checkpoint.headers import NATIVE, Headers, open_file
from quark.torch.numerics.dtypes import torch_dtype
from quark.torch.progress import show_progress


class TensorHeader(NamedTuple):
    """Header of a tensor in a file.

    Attributes:
        file: Name of the file.
        shape: Shape of the tensor as it is read.
        dtype: Its type.
        stored_bytes: Bytes that it takes in the file, None if they are those of shape and type.
    """

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in its file."""
        if self.stored_bytes is not None:
            return self.stored_bytes
        return prod(self.shape) * self.dtype.itemsize


class CheckpointReader:
    """Tensors of a checkpoint directory, or of one file in it, read one by one.

    Attributes:
        entries: Headers by name.
        metadata: Texts of the headers of the files, by name.

    Raises:
        FileNotFoundError: There are no tensors, or a file of the index is missing.
        ValueError: A file is damaged, or has changed since the headers were read.
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        headers = Headers(directory, file)
        self.directory, self.metadata = headers.directory, headers.metadata
        self._versions = headers.versions
        self.entries = {
            key: TensorHeader(entry.file, entry.shape, torch_dtype(entry.dtype))
            for key, entry in headers.entries.items()
        }

    def _open(self, file: str) -> Any:
        path, version = self.directory / file, self._versions[file]
        check_version(path, version)
        opened = open_file(path, "pt")
        check_version(path, version)  # it may have been replaced in between
        return opened

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        with self._open(self.entries[key].file) as opened:
            found: torch.Tensor = opened.get_tensor(key)
        return found

    def rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return rows of a tensor. Only they take memory, also while the file is mapped."""
        with self._open(self.entries[key].file) as opened:
            found: torch.Tensor = opened.get_slice(key)[start:stop]
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors, file by file."""
        by_file: dict[str, list[str]] = {}
        for key, entry in self.entries.items():
            by_file.setdefault(entry.file, []).append(key)
        for file, keys in _progress(by_file.items(), "reading"):
            with self._open(file) as opened:
                for key in keys:
                    yield key, opened.get_tensor(key)


class NativeReader:
    """Tensors of a ``model_state_dict.pth``, read without running anything it contains.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged, or holds something other than tensors.
    """

    def __init__(self, directory: str | Path) -> None:
        path = Path(directory) / NATIVE
        if not path.is_file():
            raise FileNotFoundError(f"{directory} has no {NATIVE}.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise ValueError(
                f"{path} is damaged, or holds more than plain tensors, which could run code and is "
                "never loaded: export the model again."
            ) from error
        values = state.values() if isinstance(state, dict) else [None]
        if not all(isinstance(v, torch.Tensor) for v in values):
            raise ValueError(f"{path} holds something other than tensors.")
        self._state: dict[str, torch.Tensor] = dict(state)
        self.entries = {
            key: TensorHeader(NATIVE, tuple(value.shape), value.dtype)
            for key, value in self._state.items()
        }

    def tensor(self, key: str) -> torch.Tensor:
        """Return one tensor."""
        return self._state[key]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over all tensors."""
        yield from self._state.items()


def _progress(items: Any, what: str) -> Any:
    items = list(items)
    return show_progress(items, what) if len(items) > 1 else items
