"""Instructions of LLVM on vectors, from which ``native_array_instruction`` builds loops.

Numba keeps the machine code of kernels until their own file changes, so a change of this file needs
a new ``NUMBA_CACHE_DIR``, or an edit of the files that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import Operand

LANES, FEATURE = 16, "avx512f"  # elements of a vector, and the extension that has such vectors
SUM_FLAGS = ("reassoc", "contract", "nsz")  # sums may be added in any order


class Vectors:
    """Instructions on vectors of ``LANES`` elements.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
    """

    def __init__(self, builder: Any, ir: Any) -> None:
        self.builder, self.ir = builder, ir
        self.short, self.int, self.long = (ir.IntType(n) for n in (16, 32, 64))
        self.float = ir.FloatType()
        self._types = {"uint8": ir.IntType(8), "int16": self.short, "int32": self.int}
        self._types |= {"int64": self.long, "float32": self.float}
        self.zeros = ir.Constant(self.of(self.float), [0.0] * LANES)

    def of(self, kind: Any) -> Any:
        """Return the type of a vector."""
        return self.ir.VectorType(kind, LANES)

    def constant(self, value: int) -> Any:
        """Return an integer of 64 bits."""
        return self.ir.Constant(self.long, value)

    def constants(self, value: int) -> Any:
        """Return a vector of one integer of 32 bits."""
        return self.ir.Constant(self.of(self.int), [value] * LANES)

    def spread(self, x: Any) -> Any:
        """Return a vector with one number in all places."""
        nothing = self.ir.Constant(self.of(x.type), self.ir.Undefined)
        first = self.builder.insert_element(nothing, x, self.ir.Constant(self.int, 0))
        places = self.ir.Constant(self.of(self.int), [0] * LANES)
        return self.builder.shuffle_vector(first, first, places)

    def load(self, operand: Operand, index: Any) -> Any:
        """Return the vector of an array that begins at an element."""
        return self._load(operand, index, self.of(self._types[operand.kind]))

    def load_one(self, operand: Operand, index: Any) -> Any:
        """Return an element of an array."""
        return self._load(operand, index, self._types[operand.kind])

    def _load(self, operand: Operand, index: Any, kind: Any) -> Any:
        place = self._place(operand, index, kind)
        return self.builder.load(place, align=self.bytes(operand))

    def store(self, value: Any, operand: Operand, index: Any) -> None:
        """Write a number or a vector to an array, from an element on."""
        self.builder.store(
            value, self._place(operand, index, value.type), align=self.bytes(operand)
        )

    def bytes(self, operand: Operand) -> int:
        """Return the bytes of an element of an array."""
        return int(np.dtype(operand.kind).itemsize)

    def _place(self, operand: Operand, index: Any, kind: Any) -> Any:
        offset = self.builder.mul(index, self.constant(self.bytes(operand)))
        return self.builder.inttoptr(self.builder.add(operand.address, offset), kind.as_pointer())

    def lookup(self, table: Any, places: Any) -> Any:
        """Return the elements of a vector in some places: LLVM makes one instruction of this."""
        builder, result = self.builder, self.ir.Constant(table.type, self.ir.Undefined)
        for lane in range(LANES):
            index = self.ir.Constant(self.int, lane)
            element = builder.extract_element(table, builder.extract_element(places, index))
            result = builder.insert_element(result, element, index)
        return result

    def sum(self, x: Any) -> Any:
        """Return the sum of the elements of a vector."""
        kind = self.ir.FunctionType(self.float, [self.float, x.type])
        function = self._reduction(f"fadd.v{LANES}f32", kind)
        start = self.ir.Constant(self.float, 0.0)
        return self.builder.call(function, [start, x], fastmath=SUM_FLAGS)

    def smallest(self, x: Any) -> Any:
        """Return the smallest element of a vector of signed integers."""
        return self._extreme("smin", x)

    def largest(self, x: Any) -> Any:
        """Return the largest element of a vector of signed integers."""
        return self._extreme("smax", x)

    def _extreme(self, which: str, x: Any) -> Any:
        kind = self.ir.FunctionType(x.type.element, [x.type])
        function = self._reduction(f"{which}.v{LANES}i{x.type.element.width}", kind)
        return self.builder.call(function, [x])

    def _reduction(self, name: str, kind: Any) -> Any:
        """Return a function of LLVM that makes a number of a vector, declared once."""
        name, module = f"llvm.vector.reduce.{name}", self.builder.module
        return module.globals.get(name) or self.ir.Function(module, kind, name)

    def bfloat16_bits(self, x: Any) -> Any:
        """Return the bits of float32 numbers that are rounded to bfloat16, ties to even."""

        class BFloat(self.ir.Type):  # type: ignore[name-defined, misc]  # llvmlite has no such type
            def _to_string(self) -> str:
                return "bfloat"

        rounded = self.builder.fptrunc(x, self.of(BFloat()))
        return self.builder.bitcast(rounded, self.of(self.short))

    def loop(
        self,
        start: Any,
        stop: Any,
        step: int,
        sums: Sequence[Any],
        body: Callable[[Any, list[Any]], Sequence[Any]],
    ) -> tuple[Any, list[Any]]:
        """Repeat instructions while so many steps fit.

        Args:
            start: First index.
            stop: End of the indices.
            step: Between indices.
            sums: Vectors before the first turn.
            body: Returns the vectors after a turn, given its index and those before it.

        Returns:
            The first index that is left, and the vectors.
        """
        builder, before = self.builder, self.builder.block
        head, turn, end = (builder.append_basic_block(n) for n in ("head", "turn", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        index, carried = builder.phi(self.long), [builder.phi(x.type) for x in sums]
        following = builder.add(index, self.constant(step))
        builder.cbranch(builder.icmp_signed("<=", following, stop), turn, end)
        builder.position_at_end(turn)
        after = body(index, carried)
        for phi, first, later in zip(
            [index, *carried], [start, *sums], [following, *after], strict=True
        ):
            phi.add_incoming(first, before)
            phi.add_incoming(later, builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        return index, carried
