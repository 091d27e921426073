"""Instructions of LLVM on vectors, from which ``native_array_instruction`` builds loops.

Numba keeps the machine code of kernels until their own file changes, so a change of this file needs
a new ``NUMBA_CACHE_DIR``, or an edit of the files that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quark.torch.numerics.native.compilation import Operand, has_feature

LANES = 16  # elements of a vector: one register of AVX-512, two of AVX2
HALF = LANES // 2  # elements of half a vector
FEATURE, WIDE = "avx2", "avx512f"  # the extension that kernels need; the one with whole vectors
BFLOAT16 = "avx512bf16"  # the extension that rounds to bfloat16
SUM_FLAGS = ("reassoc", "contract", "nsz")  # sums may be added in any order


class Vectors:
    """Instructions on vectors.

    Args:
        builder: Builder of instructions.
        ir: The module ``llvmlite.ir``.
        lanes: Elements of a vector.
    """

    def __init__(self, builder: Any, ir: Any, lanes: int = LANES) -> None:
        self.builder, self.ir, self.lanes = builder, ir, lanes
        self.short, self.int, self.long = (ir.IntType(n) for n in (16, 32, 64))
        self.float = ir.FloatType()
        byte = ir.IntType(8)
        self._types = {"uint8": byte, "int8": byte, "int16": self.short}
        self._types |= {"int32": self.int}
        self._types |= {"int64": self.long, "float32": self.float}
        self.zeros = ir.Constant(self.of(self.float), [0.0] * lanes)

    def of(self, kind: Any) -> Any:
        """Return the type of a vector."""
        return self.ir.VectorType(kind, self.lanes)

    def constant(self, value: int) -> Any:
        """Return an integer of 64 bits."""
        return self.ir.Constant(self.long, value)

    def constants(self, value: int) -> Any:
        """Return a vector of one integer of 32 bits."""
        return self.ir.Constant(self.of(self.int), [value] * self.lanes)

    def spread(self, x: Any) -> Any:
        """Return a vector with one number in all places."""
        nothing = self.ir.Constant(self.of(x.type), self.ir.Undefined)
        first = self.builder.insert_element(nothing, x, self.ir.Constant(self.int, 0))
        places = self.ir.Constant(self.of(self.int), [0] * self.lanes)
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

    def load_halves(self, operand: Operand, index: Any) -> Any:
        """Return a vector with an element of an array in its first half, the next in the second."""
        pair = self._load(operand, index, self.ir.VectorType(self._types[operand.kind], 2))
        half = self.lanes // 2
        order = self.ir.Constant(self.of(self.int), [0] * half + [1] * half)
        return self.builder.shuffle_vector(pair, pair, order)

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
        """Return the elements of a vector in some places.

        Args:
            table: Vector of float32.
            places: Vector of integers of 32 bits, below ``LANES``.
        """
        if not has_feature(WIDE):
            return self._lookup_halves(table, places)
        # LLVM makes one instruction of this.
        builder, result = self.builder, self.ir.Constant(table.type, self.ir.Undefined)
        for lane in range(LANES):
            index = self.ir.Constant(self.int, lane)
            element = builder.extract_element(table, builder.extract_element(places, index))
            result = builder.insert_element(result, element, index)
        return result

    def _lookup_halves(self, table: Any, places: Any) -> Any:
        """Return the same by an instruction of AVX2, which looks up 8 places in 8 elements."""
        builder, eight = self.builder, LANES // 2
        low, high = (self._part(table, start) for start in (0, eight))
        kind = self.ir.FunctionType(low.type, [low.type, self.ir.VectorType(self.int, eight)])
        permute = self._function("llvm.x86.avx2.permps", kind)
        halves = []
        for start in (0, eight):
            half = self._part(places, start)
            is_low = builder.icmp_signed("<", half, self.ir.Constant(half.type, [eight] * eight))
            looked_up = (builder.call(permute, [part, half]) for part in (low, high))
            halves.append(builder.select(is_low, *looked_up))
        order = self.ir.Constant(self.of(self.int), list(range(LANES)))
        return builder.shuffle_vector(*halves, order)

    def _part(self, x: Any, start: int) -> Any:
        """Return half of a vector."""
        kind = self.ir.VectorType(self.int, LANES // 2)
        places = self.ir.Constant(kind, list(range(start, start + LANES // 2)))
        return self.builder.shuffle_vector(x, x, places)

    def lookup_bytes(self, table: Any, places: Any) -> Any:
        """Return the bytes of a table in some places, by an instruction of AVX2 for 32 bytes.

        Args:
            table: 16 bytes, twice, as 8 integers of 32 bits.
            places: Four places below 16 in each of 8 integers of 32 bits.
        """
        kind = self.ir.VectorType(self.ir.IntType(8), 4 * self.lanes)
        permute = self._function("llvm.x86.avx2.pshuf.b", self.ir.FunctionType(kind, [kind, kind]))
        both = [self.builder.bitcast(x, kind) for x in (table, places)]
        return self.builder.bitcast(self.builder.call(permute, both), places.type)

    def sum(self, x: Any) -> Any:
        """Return the sum of the elements of a vector."""
        kind = self.ir.FunctionType(self.float, [self.float, x.type])
        function = self._reduction(f"fadd.v{self.lanes}f32", kind)
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
        function = self._reduction(f"{which}.v{self.lanes}i{x.type.element.width}", kind)
        return self.builder.call(function, [x])

    def _reduction(self, name: str, kind: Any) -> Any:
        """Return a function of LLVM that makes a number of a vector."""
        return self._function(f"llvm.vector.reduce.{name}", kind)

    def _function(self, name: str, kind: Any) -> Any:
        """Return a function of LLVM, declared once."""
        module = self.builder.module
        return module.globals.get(name) or self.ir.Function(module, kind, name)

    def bfloat16_bits(self, x: Any) -> Any:
        """Return the bits of float32 numbers that are rounded to bfloat16, ties to even.

        NaN is not among them.
        """
        if not has_feature(BFLOAT16):  # LLVM would call a function that processes may not have
            return self._round_bits(x)

        class BFloat(self.ir.Type):  # type: ignore[name-defined, misc]  # llvmlite has no such type
            def _to_string(self) -> str:
                return "bfloat"

        rounded = self.builder.fptrunc(x, self.of(BFloat()))
        return self.builder.bitcast(rounded, self.of(self.short))

    def _round_bits(self, x: Any) -> Any:
        """Return the same by integers: half of the last place is added, and its lowest bit."""
        builder, bits = self.builder, self.builder.bitcast(x, self.of(self.int))
        places = self.constants(16)
        lowest = builder.and_(builder.lshr(bits, places), self.constants(1))
        up = builder.add(builder.add(bits, self.constants(0x7FFF)), lowest)
        return builder.trunc(builder.lshr(up, places), self.of(self.short))

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
