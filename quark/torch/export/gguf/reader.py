"""The header of a GGUF file, and its tensors as they lie there.

Every count and length is compared with the size of the file before anything is made of it, so that
a damaged file is an error and never more work than a sound one.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT, MOST_AXES = 32, 4
# Number of a type -> its name, elements of a block, bytes of a block.
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
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
# Number of the type of a value -> how struct calls it.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """Where a tensor lies and what it is.

    Attributes:
        kind: Name of its type, such as Q4_0.
        shape: Its shape, rows first as in torch.
        start: Its first byte in the file.
        bytes: How many it takes.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int


class GgufFile:
    """A GGUF file, its header read and checked.

    Attributes:
        version: Version of the format.
        values: Numbers and strings of the header by key; an array is None.
        tensors: Tensors by name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or of a version or type that is not known here.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} does not exist.")
        with self.path.open("rb") as file:
            if not self.path.stat().st_size:
                raise self._damaged("it is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if self._bytes(4) != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        self.version: int = self._number("I")
        if self.version not in VERSIONS:
            raise self._damaged(f"its version is {self.version}, known are 2 and 3")
        tensors, values = self._number("Q"), self._number("Q")
        for _ in range(self._count(values, 13)):
            key = self._string()
            if key in self.values:
                raise self._damaged(f"{key} is there twice")
            self.values[key] = self._value(self._number("I"))
        self._read_tensors(self._count(tensors, 32))

    def blocks(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor by rows: (…, bytes of a row) uint8, not copied."""
        tensor = self.tensors[name]
        found = torch.frombuffer(
            self._data, dtype=torch.uint8, count=tensor.bytes, offset=tensor.start
        )
        return found.reshape(*tensor.shape[:-1], -1)

    def _read_tensors(self, count: int) -> None:
        alignment = self.values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        found: dict[str, tuple[int, tuple[int, ...], int]] = {}
        for _ in range(count):
            name, axes = self._string(), self._number("I")
            if name in found or not 1 <= axes <= MOST_AXES:
                raise self._damaged(f"{name} is there twice or has {axes} axes")
            shape = tuple(self._number("Q") for _ in range(axes))
            found[name] = self._number("I"), shape[::-1], self._number("Q")
        base = -(-self._at // alignment) * alignment
        for name, (number, shape, offset) in found.items():
            if number not in _TYPES:
                raise self._damaged(f"{name} is of the unknown type {number}")
            kind, block, size = _TYPES[number]
            if min(shape) < 1 or shape[-1] % block or offset % alignment:
                raise self._damaged(f"{name} of type {kind} has the shape {list(shape)}")
            taken = prod(shape) // block * size
            if base + offset + taken > len(self._data):
                raise self._damaged(f"{name} reaches beyond its end")
            self.tensors[name] = GgufTensor(kind, shape, base + offset, taken)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._code(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            for _ in range(self._count(count, 8)):
                self._bytes(self._number("Q"))
        else:
            size = struct.calcsize(self._code(inner))
            self._bytes(self._count(count, size) * size)
        return None

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"a value is of the unknown type {kind}")
        return _NUMBERS[kind]

    def _count(self, count: int, size: int) -> int:
        """Return a count of things of at least ``size`` bytes, if the rest can hold them."""
        if count * size > len(self._data) - self._at:
            raise self._damaged(f"it announces {count} entries")
        return count

    def _string(self) -> str:
        try:
            return self._bytes(self._number("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a name is not UTF-8") from None

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize(code)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._damaged("it ends too early")
        self._at += count
        return self._data[self._at - count : self._at]

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged or no GGUF file that is read here: {why}.")
