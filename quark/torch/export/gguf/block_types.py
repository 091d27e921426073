"""The types of blocks of ggml whose codes are read and written: one row each.

A block is a sequence of parts. Its values are

=============================  ==================================================
parts                          value
=============================  ==================================================
scale                          scale * code, or scale * value of the code (IQ4_NL)
scale, minimum                 scale * code + minimum
scale, factors                 scale * factor * code
scale, minimum, factors        scale * factor * code - minimum * factor of minimum
scales                         scale of the group * code
=============================  ==================================================

Scales and minima are float16, and factors are integers for each group of a block of 256 elements,
the super-block. The scales of groups are bytes: powers of two (E8M0), or e4m3 times a float32
number that a tensor of its own holds. ``planes`` says where the bits of codes are.
"""

from __future__ import annotations

from typing import NamedTuple

from quark.torch.quantization.config.block_schemes import BLOCK_SCHEMES, TWO_LEVEL, BlockScheme


class BlockType(NamedTuple):
    """One type of blocks.

    Attributes:
        scheme: How a weight is quantized.
        size: Elements of a block.
        parts: Parts of a block in the order of its bytes: scale, minimum, scales, factors, and a
            plane of codes by its number.
        planes: (bits, bytes side by side) of each plane of codes, the lowest bits first; see
            ``planes.join_plane``.
    """

    scheme: BlockScheme
    size: int
    parts: tuple[str | int, ...]
    planes: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes of a block."""
        return sum(self.part_bytes(part) for part in self.parts)

    @property
    def offset(self) -> int:
        """Number that is added to codes. Those of 8 bits are stored in two's complement."""
        fmt = self.scheme.fmt
        return 1 << (fmt.bits - 1) if fmt.signed and not fmt.is_float and fmt.bits < 8 else 0

    def part_bytes(self, part: str | int) -> int:
        """Return the bytes of a part of a block."""
        if isinstance(part, int):
            return self.size * self.planes[part][0] // 8
        if part == "scales":
            return self.size // self.scheme.group
        return _FACTOR_BYTES[self.scheme.scale] if part == "factors" else _BYTES[part]


_BYTES = {"scale": 2, "minimum": 2}
_FACTOR_BYTES = {"uint4x16": 16, "int6x16": 12, "uint6x8": 12, "int8x16": 16}
_HALVES = (4, 16)  # byte i of 16 has the 4-bit codes of the elements i and i + 16
_OWN_BITS = (1, 1)  # byte i of 4 has a bit of each of the elements 8 i to 8 i + 7
_LAYOUTS: dict[str, tuple[int, tuple[str | int, ...], tuple[tuple[int, int], ...]]] = {
    "Q4_0": (32, ("scale", 0), (_HALVES,)),
    "Q4_1": (32, ("scale", "minimum", 0), (_HALVES,)),
    "Q5_0": (32, ("scale", 1, 0), (_HALVES, _OWN_BITS)),
    "Q5_1": (32, ("scale", "minimum", 1, 0), (_HALVES, _OWN_BITS)),
    "Q8_0": (32, ("scale", 0), ((8, 1),)),
    "IQ4_NL": (32, ("scale", 0), (_HALVES,)),
    "Q2_K": (256, ("factors", 0, "scale", "minimum"), ((2, 32),)),
    "Q3_K": (256, (1, 0, "factors", "scale"), ((2, 32), (1, 32))),
    "Q4_K": (256, ("scale", "minimum", "factors", 0), ((4, 32),)),
    "Q5_K": (256, ("scale", "minimum", "factors", 1, 0), ((4, 32), (1, 32))),
    "Q6_K": (256, (0, 1, "factors", "scale"), ((4, 64), (2, 32))),
}
BLOCK_TYPES = {
    **{name: BlockType(BLOCK_SCHEMES[name.lower()], *row) for name, row in _LAYOUTS.items()},
    "MXFP4": BlockType(BlockScheme("fp4", 32, False, "e8m0"), 32, ("scales", 0), (_HALVES,)),
    "NVFP4": BlockType(BlockScheme("fp4", 16, False, TWO_LEVEL), 64, ("scales", 0), ((4, 8),)),
}
