"""How a packed weight lies in memory: panels of rows, bytes that hold codes, compact scales.

A panel is a few rows of the weight. Its elements follow each other in one order, and bytes hold
codes so that whole runs of elements are decoded by few operations: a plane of w bits has 8 / w
slots, and slot s of its bytes holds run s of the elements. Codes of 6 bits are a plane of 4 bits
below a plane of 2 bits. Example of a plane of 4 bits, for a panel of 8 elements::

    elements  a b c d e f g h      bytes  ea fb gc hd      (first run in the low halves)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quark.torch.numerics.formats import Format
from quark.torch.numerics.native.slots import find_plane, read_slots

Parts = dict[str, torch.Tensor]
PLANES = (8, 4, 2, 1)
_TARGET = 1 << 17  # elements of a panel: what is decoded stays in the cache of a core


@dataclass(frozen=True)
class Arrangement:
    """Order of the elements of a weight (outputs, inputs) in panels.

    Attributes:
        outputs: Rows of the weight.
        inputs: Columns of the weight.
        group: Columns that share a scale in a row; it divides ``inputs``.
        rows: Rows of a panel, a multiple of 32 or 1. The last panel is padded with zeros.
        half: 0 for elements of a panel in the order (row, column). Else the order is (half, column,
            row of the half), for two halves of so many rows.
    """

    outputs: int
    inputs: int
    group: int
    rows: int
    half: int = 0

    @classmethod
    def of_rows(cls, outputs: int, inputs: int, group: int, parts: int = 1) -> Arrangement:
        """Return an arrangement with whole rows, and as many in a panel as fit a cache.

        It has ``parts`` panels or more if there are so many times 32 rows.
        """
        rows = min(256, _TARGET // max(inputs, 1), -(-outputs // parts // 32) * 32)
        rows = max(32, rows // 32 * 32)
        return cls(outputs, inputs, group, rows)

    @classmethod
    def of_columns(cls, outputs: int, inputs: int, group: int, half: int) -> Arrangement:
        """Return an arrangement with the columns of two halves of ``half`` rows."""
        return cls(outputs, inputs, group, 2 * half, half)

    @classmethod
    def of_single_rows(cls, outputs: int, inputs: int, group: int) -> Arrangement:
        """Return an arrangement with a row as a panel, so that runs are columns of it."""
        return cls(outputs, inputs, group, 1)

    @property
    def panels(self) -> int:
        """Number of panels."""
        return -(-self.outputs // self.rows)

    @property
    def size(self) -> int:
        """Number of elements of a panel."""
        return self.rows * self.inputs

    @property
    def grouped(self) -> tuple[int, ...]:
        """Shape of a panel over which its scales broadcast."""
        groups = self.inputs // self.group
        return (2, groups, self.group, self.half) if self.half else (-1, groups, self.group)

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """Return a matrix of ``outputs`` rows in panels, (panels, elements)."""
        missing = self.panels * self.rows - self.outputs
        x = F.pad(x, (0, 0, 0, missing)) if missing else x
        if self.half:
            x = x.view(self.panels, 2, self.half, -1).transpose(2, 3)
        return x.reshape(self.panels, -1)

    def restore(self, panels: torch.Tensor) -> torch.Tensor:
        """Undo ``arrange``."""
        if self.half:
            panels = panels.view(self.panels, 2, -1, self.half).transpose(2, 3)
        return panels.reshape(self.panels * self.rows, -1)[: self.outputs]

    def arrange_factors(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per group, (outputs, groups), in panels that broadcast."""
        arranged = self.arrange(x)
        if self.half:
            return arranged.view(self.panels, 2, -1, 1, self.half)
        return arranged.view(self.panels, self.rows, -1, 1)

    def restore_factors(self, factors: torch.Tensor) -> torch.Tensor:
        """Undo ``arrange_factors``, with the rows of padding: (panels * rows, groups)."""
        if self.half:
            factors = factors.squeeze(3).transpose(2, 3)
        return factors.reshape(self.panels * self.rows, -1)


def plane_widths(fmt: Format) -> list[int]:
    """Return the widths of the planes that hold the codes of a format, lowest bits first."""
    return [width for width in PLANES if fmt.bits & width]


def count_runs(fmt: Format) -> int:
    """Return the number of runs of a panel: the slots of the narrowest plane."""
    return 8 // min(plane_widths(fmt))


def pack_planes(codes: torch.Tensor, fmt: Format, added: int = 0) -> Parts:
    """Return the planes of codes.

    Args:
        codes: Codes (panels, elements): uint8, the bits of those of up to 8 bits; else int16.
        fmt: Format of the codes.
        added: What is added to each code first, in its type; at most 128 in uint8.
    """
    parts, below = {}, 0
    for width in plane_widths(fmt):
        slots = codes.view(len(codes), 8 // width, -1)
        plane = find_plane(slots, width, below, added)
        if plane is None:
            plane = _join((slots + added) >> below, width)
        parts[f"plane_{width}"] = plane
        below += width
    return parts


def _join(slots: torch.Tensor, width: int) -> torch.Tensor:
    slots = (slots & ((1 << width) - 1)).to(torch.uint8)
    plane = slots[:, 0].clone()
    for slot in range(1, 8 // width):
        plane |= slots[:, slot] << (width * slot)
    return plane


def unpack_planes(parts: Parts, fmt: Format, added: int = 0) -> torch.Tensor:
    """Return codes (panels, elements) as ``pack_planes`` takes them: undo it."""
    lowest, below = plane_widths(fmt)[0], 0
    first = parts[f"plane_{lowest}"]
    dtype = torch.uint8 if fmt.bits <= PLANES[0] else torch.int16
    codes = first.new_empty(len(first), first.shape[1] * 8 // lowest, dtype=dtype)
    for width in plane_widths(fmt):
        plane, slots = parts[f"plane_{width}"], codes.view(len(codes), 8 // width, -1)
        if not read_slots(plane, slots, width, below):
            for slot in range(8 // width):
                bits = (plane >> (width * slot) & ((1 << width) - 1)).to(dtype) << below
                slots[:, slot] = slots[:, slot] | bits if below else bits
        below += width
    return codes.sub_(added) if added else codes


def compact(factors: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in the smallest type that holds them exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        smaller = factors.to(dtype)
        if torch.equal(smaller.float(), factors):
            return smaller
    return factors
