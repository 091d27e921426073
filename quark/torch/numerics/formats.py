"""Number formats. A format is a value: its range, grid and packing derive from its fields."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

from quark.torch.numerics.dtypes import torch_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: Name used in configurations and checkpoints.
        bits: Width of one code.
        signed: Whether there are negative codes; integers are in two's complement.
        exponent_bits: Exponent width of a float, 0 for integers.
        mantissa_bits: Stored mantissa width of a float, 0 for integers.
        max_value: Largest finite magnitude of a float, 0 for integers.
        native: Name of the type of torch with exactly the values of a float format.
        scaled: Whether values are divided by a scale before rounding. bfloat16 and float16 are
            plain casts.
        word_codes: Number of codes in a packed word; 1 stores codes unpacked.
        word_dtype: Name of the type of the elements of packed storage. A word may span several.
        first_high: Whether the first code of a word is in its highest bits.
        narrow: Whether an integer format excludes its most negative code.
        fraction_bits: Bits after the binary point of an integer code.
        block: Elements that share an exponent, if the format fixes their number; else 0.
        sub_block: Elements of a block that share a one-bit shift of the exponent.
    """

    name: str
    bits: int
    signed: bool = True
    exponent_bits: int = 0
    mantissa_bits: int = 0
    max_value: float = 0.0
    native: str | None = None
    scaled: bool = True
    word_codes: int = 1
    word_dtype: str | None = None
    first_high: bool = False
    narrow: bool = False
    fraction_bits: int = 0
    block: int = 0
    sub_block: int = 0

    @property
    def is_float(self) -> bool:
        """Whether codes stand for floats or values of a table, which no zero point moves."""
        return self.exponent_bits > 0

    @property
    def has_rule(self) -> bool:
        """Whether the bits of a code give its value. Kernels compute values by this rule."""
        return True

    @property
    def takes_signed_scales(self) -> bool:
        """Whether scales may be zero or negative, as in blocks of GGUF files."""
        return not self.is_float

    @property
    def is_encoded(self) -> bool:
        """Whether codes are the bits of a float without a torch type."""
        return self.is_float and self.native is None

    @property
    def qmin(self) -> int:
        """Smallest integer code."""
        return self.narrow - (1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        """Largest integer code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """Integer code of zero in symmetric ranges: 0, or 8 of uint4."""
        return (self.qmin + self.qmax + 1) // 2

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal float, 2 - 2^(exponent_bits - 1)."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value."""
        return math.frexp(self.max_value)[1] - 1 if self.is_float else 0

    @property
    def smallest(self) -> float:
        """Smallest nonzero magnitude of a float."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def separation(self) -> float:
        """Least distance between neighboring floats, relative to the larger magnitude of both."""
        return 2.0 ** -(self.mantissa_bits + 1)

    def reach(self, steps: float = 0) -> tuple[float, float]:
        """Return the smallest and the largest value, moved outwards by a number of steps.

        Example, fp4: the step at 6 is 2, so half a step leads from 6 to 7.
        """
        if not self.is_float:
            return self.qmin - steps, self.qmax + steps
        most = self.max_value + steps * 2.0 ** (self.max_exponent - self.mantissa_bits)
        return -most if self.signed else 0.0, most

    @property
    def code_type(self) -> str:
        """Name of the type of a tensor of unpacked codes."""
        if self.native is not None:
            return self.native
        if self.is_float:
            return "uint8"
        wide = 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32
        return f"int{wide}" if self.signed else f"uint{wide}"

    @property
    def has_word_orders(self) -> bool:
        """Whether codes lie in 32-bit words in one of several orders; see ``numerics.packing``."""
        return self.word_codes > 1 and self.storage_type == "int32"

    @property
    def storage_type(self) -> str:
        """Name of the type of a tensor of packed codes."""
        return self.word_dtype or self.code_type

    @property
    def code_dtype(self) -> torch.dtype:
        """Type of a tensor of unpacked codes."""
        return torch_dtype(self.code_type)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Type of a tensor of packed codes."""
        return torch_dtype(self.storage_type)


@dataclass(frozen=True)
class TableFormat(Format):
    """A number format whose values follow no rule: a code is a place in a table.

    Attributes:
        values: Values of all codes, ascending.
    """

    values: tuple[float, ...] = ()

    @property
    def is_float(self) -> bool:
        """True: no zero point moves the values."""
        return True

    @property
    def has_rule(self) -> bool:
        """False: codes are looked up."""
        return False

    @property
    def takes_signed_scales(self) -> bool:
        """True: llama.cpp writes such scales."""
        return True

    @property
    def smallest(self) -> float:
        """Smallest nonzero magnitude of the table."""
        return min(abs(value) for value in self.values if value)

    @property
    def separation(self) -> float:
        """Least distance between neighboring values, relative to the larger magnitude of both."""
        pairs = pairwise(self.values)
        return min((high - low) / max(abs(low), abs(high)) for low, high in pairs)

    def reach(self, steps: float = 0) -> tuple[float, float]:
        """Return the first and the last value, moved outwards by the outermost distances."""
        first, second, *_, last_but_one, last = self.values
        return first - steps * (second - first), last + steps * (last - last_but_one)


class Dtype(Enum):
    """The number formats by name. A new format is one line here.

    ``Dtype("int8")`` and ``Dtype.from_str("INT8")`` return a member by its name.
    """

    int32 = Format("int32", 32)
    int16 = Format("int16", 16)
    uint16 = Format("uint16", 16, signed=False)
    int8 = Format("int8", 8)
    uint8 = Format("uint8", 8, signed=False)
    uint7 = Format("uint7", 7, signed=False, word_codes=8, word_dtype="uint8")
    uint6 = Format("uint6", 6, signed=False, word_codes=4, word_dtype="uint8")
    uint5 = Format("uint5", 5, signed=False, word_codes=8, word_dtype="uint8")
    int7 = Format("int7", 7, word_codes=8, word_dtype="uint8")
    int6 = Format("int6", 6, word_codes=4, word_dtype="uint8")
    int5 = Format("int5", 5, word_codes=8, word_dtype="uint8")
    int4 = Format("int4", 4, word_codes=8, word_dtype="int32")
    uint4 = Format("uint4", 4, signed=False, word_codes=8, word_dtype="int32")
    int3 = Format("int3", 3, word_codes=8, word_dtype="uint8")
    uint3 = Format("uint3", 3, signed=False, word_codes=8, word_dtype="uint8")
    uint2 = Format("uint2", 2, signed=False, word_codes=4, word_dtype="uint8", first_high=True)
    int2 = Format("int2", 2, word_codes=4, word_dtype="uint8", first_high=True)
    fp8_e4m3 = Format("fp8_e4m3", 8, True, 4, 3, 448.0, "float8_e4m3fn")
    fp8_e5m2 = Format("fp8_e5m2", 8, True, 5, 2, 57344.0, "float8_e5m2")
    fp8_e5m3 = Format("fp8_e5m3", 8, False, 5, 3, 114688.0)
    fp6_e3m2 = Format("fp6_e3m2", 6, True, 3, 2, 28.0, word_codes=4, word_dtype="uint8")
    fp6_e2m3 = Format("fp6_e2m3", 6, True, 2, 3, 7.5, word_codes=4, word_dtype="uint8")
    fp4 = Format("fp4", 4, True, 2, 1, 6.0, word_codes=2, word_dtype="uint8")
    iq4_nl = TableFormat(
        "iq4_nl",
        4,
        max_value=127.0,
        word_codes=2,
        word_dtype="uint8",
        values=tuple(
            float(x)
            for x in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
        ),
    )
    mx = Format("mx", 8, narrow=True, fraction_bits=6)
    mx6 = Format("mx6", 5, narrow=True, word_codes=8, word_dtype="uint8", block=16, sub_block=2)
    mx9 = Format("mx9", 8, narrow=True, block=16, sub_block=2)
    bfp16 = Format("bfp16", 8, block=8)
    bfloat16 = Format("bfloat16", 16, True, 8, 7, 3.3895313892515355e38, "bfloat16", False)
    float16 = Format("float16", 16, True, 5, 10, 65504.0, "float16", False)

    def __repr__(self) -> str:
        return f"Dtype.{self.name}"

    @classmethod
    def _missing_(cls, value: object) -> Dtype | None:
        return cls.__members__.get(value.lower()) if isinstance(value, str) else None

    @classmethod
    def from_str(cls, name: str) -> Dtype:
        """Return the member called ``name``, whatever its case.

        Raises:
            ValueError: No format has that name.
        """
        return cls(name)

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> Dtype:
        """Return the member whose unpacked codes are of ``dtype``.

        Raises:
            ValueError: No format has codes of that type.
        """
        for member in cls:
            if member.value.word_codes == 1 and member.value.code_dtype == dtype:
                return member
        raise ValueError(f"No number format is stored as {dtype}.")

    def to_bitwidth(self) -> int:
        """Width of one code in bits."""
        fmt: Format = self.value
        return fmt.bits

    def to_torch_packed_dtype(self) -> torch.dtype:
        """Type of a tensor of packed codes."""
        fmt: Format = self.value
        return fmt.storage_dtype
