"""Headers of a checkpoint of safetensors. They are read without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quark.torch.export.checkpoint.file_versions import FileVersion, check_version, version_of
from quark.torch.files import parse_json, read_json
from quark.torch.numerics.dtypes import ITEM_SIZES

if TYPE_CHECKING:
    import torch

STEM = "model"  # of the names of files, as Transformers reads them
INDEX_SUFFIX = ".safetensors.index.json"
NATIVE = "model_state_dict.pth"
_POINTER = b"version https://git-lfs.github.com/"  # the beginning of a pointer of Git LFS
# Types as safetensors spells them -> their names in torch.
TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "I64": "int64",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


class Entry(Protocol):
    """A tensor, or the header of one in a file."""

    @property
    def shape(self) -> Sequence[int]:
        """Length of each axis."""

    @property
    def dtype(self) -> torch.dtype | str:
        """Type of the elements, or its name."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


class StoredHeader(NamedTuple):
    """Header of a tensor in a file of safetensors.

    Attributes:
        file: Name of the file.
        shape: Shape of the tensor.
        dtype: Name of its type.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]


class Headers:
    """Headers of the files of a checkpoint directory, or of one file in it.

    Attributes:
        entries: Headers of tensors by name.
        metadata: Texts of the headers of the files, by name.
        versions: Versions of the files, by name.

    Raises:
        FileNotFoundError: There are no tensors, or a file of the index is missing.
        ValueError: A file is damaged, or another process replaces it meanwhile.
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, StoredHeader] = {}
        self.metadata: dict[str, str] = {}
        self.versions: dict[str, FileVersion] = {}
        for name in [file] if file else self._files():
            for key, entry in self._read(name):
                if key in self.entries:
                    raise ValueError(f"{self.directory}: {key} is there twice, again in {name}.")
                self.entries[key] = entry
        for name, version in self.versions.items():
            check_version(self.directory / name, version)

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
            raise FileNotFoundError(
                f"{self.directory} has no *.safetensors files: copy the weights of the model to it."
            )
        for file in files:
            # Names come from a file: they must not lead out of the directory.
            if Path(file).name != file or not (self.directory / file).is_file():
                raise FileNotFoundError(
                    f"{self.directory} lacks {file}, which its index names: copy it too."
                )
        return files

    def _read(self, file: str) -> Iterator[tuple[str, StoredHeader]]:
        self.versions[file] = version_of(self.directory / file)
        with open_file(self.directory / file, "np") as opened:
            _check_names(self.directory / file)
            self.metadata |= opened.metadata() or {}
            for key in opened.keys():  # noqa: SIM118 - not a mapping
                entry = opened.get_slice(key)
                dtype = TYPES.get(entry.get_dtype())
                if dtype is None:
                    raise ValueError(f"{file}: {key} has the unknown type {entry.get_dtype()}.")
                yield key, StoredHeader(file, tuple(entry.get_shape()), dtype)


def open_file(path: Path, framework: str) -> Any:
    """Open a file of safetensors.

    Args:
        path: The file.
        framework: Whose tensors are read: ``pt``, or ``np``, which needs no torch.

    Raises:
        FileNotFoundError: There is no such file.
        PermissionError: It may not be read.
        ValueError: The file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except FileNotFoundError:
        if path.exists() and not os.access(path, os.R_OK):  # safetensors says that it is missing
            raise PermissionError(f"{path} may not be read: change its permissions.") from None
        raise
    except SafetensorError as error:
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise ValueError(
                    f"{path} is a pointer of Git LFS, without the weights: run 'git lfs pull' in "
                    f"{path.parent}, or download the model with 'hf download'."
                ) from None
        raise ValueError(
            f"{path} is damaged or not a safetensors file ({error}): copy or export it again."
        ) from None


def _check_names(path: Path) -> None:
    """Raise if a sound header has a name twice: readers differ in which they take."""
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        parse_json(opened.read(size), path)


def _indexed_files(index: Path) -> list[str]:
    data = read_json(index)
    files = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise ValueError(f"{index} has no weight_map of tensor names to file names.")
    return sorted(set(files.values()))
