"""Writing safetensors: shards whose tensors come one by one, in any order.

A file of safetensors is eight bytes with the length of the header, the header in JSON, and the
tensors, those of wide types first. Names, shapes and types give all of it but the values, so every
tensor is written at its place as soon as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from quark.torch.export.checkpoint.headers import INDEX_SUFFIX, STEM, TYPES, Entry
from quark.torch.files import write_json
from quark.torch.numerics.dtypes import torch_dtype
from quark.torch.pipeline.batches import show_progress

_NAMES = {torch_dtype(name): spelling for spelling, name in TYPES.items()}
# Types in the order of the files that the package safetensors writes, from the last to the first.
_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)
_ALIGNMENT = 8  # bytes: the length of a header is a multiple of it


class _Place(NamedTuple):
    """Where a tensor is written: a file, and the number of its first byte there."""

    file: Path
    start: int


class ShardWriter:
    """Writes tensors of known shapes to the shards of a checkpoint.

    ``add`` may be called by several threads at the same time, in any order of tensors: the files
    are the same.

    Args:
        directory: Directory to write to. Files of the full size are made at once.
        entries: Shape and type of every tensor, in the order in which shards are filled. Tensors on
            the meta device will do.
        max_shard_size: Size above which tensors are spread over several files, such as "5GB".
        stem: What the names of files begin with, such as ``model`` in ``model.safetensors``.
        metadata: Texts for the header of each file, by name.

    Raises:
        ValueError: safetensors has no name for the type of a tensor.
    """

    def __init__(
        self,
        directory: Path,
        entries: Mapping[str, torch.Tensor],
        max_shard_size: str | int,
        stem: str = STEM,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        from huggingface_hub import split_state_dict_into_shards_factory

        self._directory, self._entries, self._places = directory, entries, dict[str, _Place]()
        self._stem, self._metadata = stem, {**(metadata or {}), "format": "pt"}
        self._plan = split_state_dict_into_shards_factory(
            dict(entries),
            get_storage_size=_size,
            filename_pattern=f"{stem}{{suffix}}.safetensors",
            max_shard_size=max_shard_size,
        )
        for file, names in self._plan.filename_to_tensors.items():
            self._make_file(directory / file, names)
        self._missing = set(self._places)
        self._rows: dict[str, int] = {}  # written rows of tensors that come in parts

    def _make_file(self, file: Path, names: Iterable[str]) -> None:
        """Write the header of a shard, and make the file as long as it will be."""
        described: dict[str, object] = {"__metadata__": self._metadata}
        starts: dict[str, int] = {}
        end = 0
        for name in sorted(names, key=lambda n: (-_rank(self._entries[n]), n)):
            tensor = self._entries[name]
            starts[name], end = end, end + _size(tensor)
            described[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [starts[name], end],
            }
        header = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        first = 8 + len(header)
        with file.open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.truncate(first + end)
        self._places |= {name: _Place(file, first + start) for name, start in starts.items()}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor to its place.

        Args:
            name: A name of ``entries``.
            tensor: Its value, on any device.

        Raises:
            ValueError: The tensor was not announced, or has another shape or type, or was written.
            OSError: The disk is full.
        """
        expected = self._entries.get(name)
        if expected is None or (expected.shape, expected.dtype) != (tensor.shape, tensor.dtype):
            announced = "nothing" if expected is None else _describe(expected)
            raise ValueError(f"{name} is {_describe(tensor)}, but {announced} was announced.")
        if name not in self._missing or name in self._rows:
            raise ValueError(f"{name} is written twice.")
        self._write(self._places[name], tensor)
        self._missing.discard(name)

    def add_rows(self, name: str, rows: torch.Tensor) -> None:
        """Write the next rows of a tensor, that comes in parts along its first axis.

        Args:
            name: A name of ``entries``.
            rows: Rows, on any device.

        Raises:
            ValueError: The tensor was not announced, has rows of another shape or type, or has
                fewer rows.
            OSError: The disk is full.
        """
        expected, start = self._entries.get(name), self._rows.get(name, 0)
        if expected is None or not _fits(rows, expected, start) or name not in self._missing:
            announced = "nothing" if expected is None else _describe(expected)
            raise ValueError(
                f"{_describe(rows)} follow {start} rows of {name}, but {announced} was announced."
            )
        place = self._places[name]
        self._write(place._replace(start=place.start + start * _size(expected[:1])), rows)
        self._rows[name] = start + len(rows)
        if self._rows[name] == expected.shape[0]:
            self._missing.discard(name)

    def _write(self, place: _Place, tensor: torch.Tensor) -> None:
        whole = tensor.detach().cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # one element may have any stride
        data = flat.view(torch.uint8).numpy().data
        with place.file.open("r+b", buffering=0) as opened:
            opened.seek(place.start)
            written = 0
            while written < len(data):  # the system may write a part of a large tensor
                written += opened.write(data[written:]) or 0

    def finish(self) -> None:
        """Write the index, if there are several shards.

        Raises:
            ValueError: A tensor was not written.
        """
        if self._missing:
            raise ValueError(f"{min(self._missing)} was announced, but not written.")
        if self._plan.is_sharded:
            index = {"metadata": self._plan.metadata, "weight_map": self._plan.tensor_to_filename}
            write_json(self._directory / f"{self._stem}{INDEX_SUFFIX}", index)


def write_tensors(
    tensors: dict[str, torch.Tensor], directory: Path, max_shard_size: str | int
) -> None:
    """Write tensors as safetensors, in several files with an index above ``max_shard_size``."""
    writer = ShardWriter(directory, tensors, max_shard_size)
    for name, tensor in show_progress(list(tensors.items()), "writing"):
        writer.add(name, tensor)
    writer.finish()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _rank(tensor: Entry) -> int:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"safetensors cannot hold tensors of {tensor.dtype}.")
    return _ORDER.index(_NAMES[tensor.dtype])


def _fits(rows: torch.Tensor, whole: torch.Tensor, start: int) -> bool:
    """Whether rows of a tensor have its type and shape, and lie inside of it."""
    is_alike = (rows.shape[1:], rows.dtype) == (whole.shape[1:], whole.dtype)
    return is_alike and 0 < rows.dim() == whole.dim() and start + len(rows) <= len(whole)


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
