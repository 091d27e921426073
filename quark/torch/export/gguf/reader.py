"""Reading GGUF files: the header, and the bytes of tensors.

Every count and length in the header is compared with the size of the file before it is used. A
damaged file is an error, and never takes more time or memory than an intact one.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quark.torch.export.checkpoint.file_versions import check_version, version_of

if TYPE_CHECKING:
    import torch


MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, MAX_AXES = 32, 4
# Number of a tensor type -> its name, elements of a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# Number of the type of a value -> format character of struct.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Header of a tensor.

    Attributes:
        kind: Name of its type, such as Q4_0.
        shape: Its shape in the order of torch. GGUF stores it reversed: columns first.
        start: Offset of its first byte in the file.
        bytes: Its size in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


class GgufEntry(NamedTuple):
    """A value of the header.

    Attributes:
        kind: Number of its type.
        inner: Number of the type of its elements, None if it is no array.
        value: A number, the bytes of a string, or a list of these.
    """

    kind: int
    inner: int | None
    value: Any


class GgufFile:
    """A GGUF file, opened for reading.

    Args:
        path: Path of the file.

    Attributes:
        version: Version of the format.
        values: Numbers and strings of the header by key. Arrays are skipped: their value is None.
        tensors: Headers of tensors by name.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or has an unknown version or type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} does not exist.")
        with self.path.open("rb") as file:
            if not self.path.stat().st_size:
                raise self._damaged("it is empty")
            self._version = version_of(file.fileno())
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = 0
        self.values: dict[str, Any] = {}
        self._starts: dict[str, int] = {}  # of the types of the values
        self.tensors: dict[str, GgufTensor] = {}
        if self._read_bytes(4) != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        self.version: int = self._read_number("I")
        if self.version not in VERSIONS:
            raise self._damaged(f"its version is {self.version}, known are 2 and 3")
        tensors, values = self._read_number("Q"), self._read_number("Q")
        # At least 13 bytes per value: length of the key 8, type 4, content 1. At least 32 per
        # tensor: length of the name 8, number of axes 4, one axis 8, type 4, offset 8.
        for _ in range(self._check_count(values, 13)):
            key = self._read_string()
            if key in self.values:
                raise self._damaged(f"{key} is there twice")
            self._starts[key] = self._position
            self.values[key] = self._read_value(self._read_number("I"))
        self._read_tensors(self._check_count(tensors, 32))

    @property
    def header_bytes(self) -> int:
        """Bytes of the file before its tensors, most of which is the vocabulary."""
        return min((tensor.start for tensor in self.tensors.values()), default=0)

    def blocks(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return the bytes of a tensor by rows: (…, bytes of a row) uint8.

        They are read, not mapped to memory: what was read of a large file would stay there.

        Args:
            name: Name of the tensor.
            index: Place on its first axis, which is left out of the result; None for all.

        Raises:
            ValueError: The file has become shorter.
        """
        import torch

        tensor = self.tensors[name]
        shape = tensor.shape if index is None else tensor.shape[1:]
        size = tensor.bytes if index is None else tensor.bytes // tensor.shape[0]
        data = bytearray(size)
        with self.path.open("rb") as file:
            check_version(self.path, self._version, file.fileno())
            file.seek(tensor.start + (index or 0) * size)
            if file.readinto(data) < size:
                raise self._damaged(f"{name} reaches beyond its end")
        return torch.frombuffer(data, dtype=torch.uint8).reshape(*shape[:-1], -1)

    def read_entries(self, prefix: str) -> dict[str, GgufEntry]:
        """Return the values whose keys begin with ``prefix``, arrays included, by key."""
        entries = {}
        for key in (key for key in self._starts if key.startswith(prefix)):
            self._position = self._starts[key]
            kind, inner = self._read_number("I"), None
            if kind == _ARRAY:
                inner = self._read_number("I")
                value: Any = [self._read_plain(inner) for _ in range(self._read_number("Q"))]
            else:
                value = self._read_plain(kind)
            entries[key] = GgufEntry(kind, inner, value)
        return entries

    def _read_plain(self, kind: int) -> Any:
        if kind == STRING:
            return self._read_bytes(self._read_number("Q"))
        return self._read_number(self._struct_format(kind))

    def _read_tensors(self, count: int) -> None:
        alignment = self.values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        headers: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(count):
            name, axes = self._read_string(), self._read_number("I")
            if name in headers or not 1 <= axes <= MAX_AXES:
                raise self._damaged(f"{name} is there twice or has {axes} axes")
            shape = tuple(self._read_number("Q") for _ in range(axes))
            headers[name] = self._read_number("I"), shape[::-1], self._read_number("Q")
        base = -(-self._position // alignment) * alignment
        for name, (number, shape, offset) in headers.items():
            if number not in _TYPES:
                raise self._damaged(f"{name} is of the unknown type {number}")
            kind, block, size = _TYPES[number]
            if min(shape) < 1 or shape[-1] % block or offset % alignment:
                raise self._damaged(f"{name} of type {kind} has the shape {list(shape)}")
            length = prod(shape) // block * size
            if base + offset + length > len(self._data):
                raise self._damaged(f"{name} reaches beyond its end")
            self.tensors[name] = GgufTensor(kind, shape, base + offset, length)

    def _read_value(self, kind: int) -> Any:
        if kind == STRING:
            return self._read_string()
        if kind != _ARRAY:
            return self._read_number(self._struct_format(kind))
        inner, count = self._read_number("I"), self._read_number("Q")
        if inner == STRING:
            for _ in range(self._check_count(count, 8)):
                self._read_bytes(self._read_number("Q"))
        else:
            size = struct.calcsize(self._struct_format(inner))
            self._read_bytes(self._check_count(count, size) * size)
        return None

    def _struct_format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"a value is of the unknown type {kind}")
        return _NUMBERS[kind]

    def _check_count(self, count: int, size: int) -> int:
        """Return ``count`` if so many entries of at least ``size`` bytes fit in the rest."""
        if count * size > len(self._data) - self._position:
            raise self._damaged(f"it claims {count} entries")
        return count

    def _read_string(self) -> str:
        try:
            return self._read_bytes(self._read_number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a name is not UTF-8") from None

    def _read_number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._read_bytes(struct.calcsize(code)))[0]

    def _read_bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._position:
            raise self._damaged("it ends too early")
        self._position += count
        return self._data[self._position - count : self._position]

    def _damaged(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} is damaged or not a supported GGUF file: {why}. Copy it again."
        )
