"""Files of a checkpoint: safetensors in shards, and the native format, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from quark.torch.files import parse_json, read_json
from quark.torch.progress import show_progress

STEM = "model"  # of the names of files, as Transformers reads them
INDEX_SUFFIX = ".safetensors.index.json"
NATIVE = "model_state_dict.pth"


class Entry(Protocol):
    """A tensor, or the header of one in a file."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each axis."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


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


# Types as safetensors spells them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointReader:
    """Tensors of a checkpoint directory, or of one file in it, read one by one.

    Attributes:
        entries: Headers by name.
        metadata: Texts of the headers of the files, by name.

    Raises:
        FileNotFoundError: There are no tensors, or a file of the index is missing.
        ValueError: A file is damaged.
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, TensorHeader] = {}
        self.metadata: dict[str, str] = {}
        for name in [file] if file else self._files():
            for key, entry in self._header(name):
                if key in self.entries:
                    raise ValueError(f"{self.directory}: {key} is there twice, again in {name}.")
                self.entries[key] = entry

    def _files(self) -> list[str]:
        indexes = sorted(self.directory.glob(f"*{INDEX_SUFFIX}"))
        index, single = self.directory / f"{STEM}{INDEX_SUFFIX}", f"{STEM}.safetensors"
        if index in indexes:
            files = _indexed_files(index)
        elif (self.directory / single).is_file():
            files = [single]
        elif len(indexes) == 1:
            files = _indexed_files(indexes[0])
        else:
            files = sorted(f.name for f in self.directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{self.directory} has no *.safetensors files.")
        for file in files:
            # Names come from a file: they must not lead out of the directory.
            if Path(file).name != file or not (self.directory / file).is_file():
                raise FileNotFoundError(f"{self.directory} lacks {file}, which its index names.")
        return files

    def _header(self, file: str) -> Iterator[tuple[str, TensorHeader]]:
        with self._open(file) as opened:
            self._check_names(file)
            self.metadata |= opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                entry = opened.get_slice(key)
                dtype = DTYPES.get(entry.get_dtype())
                if dtype is None:
                    raise ValueError(f"{file}: {key} has the unknown type {entry.get_dtype()}.")
                yield key, TensorHeader(file, tuple(entry.get_shape()), dtype)

    def _check_names(self, file: str) -> None:
        """Raise if a sound header has a name twice: readers differ in which they take."""
        with (self.directory / file).open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            parse_json(opened.read(size), self.directory / file)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.directory / file, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{self.directory / file} is damaged or not a safetensors file ({error}): "
                "copy or export it again."
            ) from None

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


def _indexed_files(index: Path) -> list[str]:
    data = read_json(index)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names.")
    return sorted(set(files.values()))


def _progress(items: Any, what: str) -> Any:
    items = list(items)
    return show_progress(items, what) if len(items) > 1 else items
