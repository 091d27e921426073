"""Rounding of a matrix one column at a time, for solvers that correct the columns that follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch

from quark.torch.numerics.qdq import Factors, round_trip
from quark.torch.numerics.scheme import Scheme

# Rounds some rows, (rows, columns), given their rounding.
Attempt = Callable[[torch.Tensor, "ColumnRounding"], torch.Tensor]


class ColumnRounding(Protocol):
    """Rounds a matrix one column at a time."""

    def __call__(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the rounded values of a column in float32.

        Args:
            x: (rows,) values.
            column: Index of the column.
        """
        ...

    def select_rows(self, rows: torch.Tensor) -> ColumnRounding:
        """Return the rounding of some rows, (rows,) int64, of every column."""
        ...

    def round_rows(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        hessian: torch.Tensor,
        attempt: Attempt,
        multiples: Sequence[float] = (1.0,),
    ) -> torch.Tensor:
        """Return some rows rounded by a function, under scales that are fitted to the result.

        Where scales may change, each row is rounded under several multiples of its scales, which
        are then fitted; the values with the least squared error stay, with their scales. Where
        scales are final, the function rounds each row once.

        Args:
            rows: Indices of the rows, (rows,) int64.
            target: What they should become, (rows, columns) float32.
            hessian: Weight of errors, (columns, columns), positive definite.
            attempt: Rounds the target, or several copies of it one behind the other.
            multiples: Of the scales that the rows have now.
        """
        ...


class ColumnRounder:
    """Rounds columns under given scales; see ``ColumnRounding``.

    Attributes:
        factors: Scales and zero points of every value, (columns, rows).
        scheme: How the matrix is quantized.
    """

    def __init__(self, factors: Factors, scheme: Scheme) -> None:
        self.factors, self.scheme = factors, scheme

    @cached_property
    def _columns(self) -> list[Factors]:
        """Factors of each column; kernels do not need them."""
        return self.factors.split_columns()

    @classmethod
    def from_scale(
        cls,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        scheme: Scheme,
        shape: tuple[int, ...],
        to_matrix: Callable[[torch.Tensor], torch.Tensor],
    ) -> ColumnRounder:
        """Return the rounding of a weight as a matrix, under given scales.

        Args:
            scale: One per block.
            zero_point: Like ``scale``, or None.
            scheme: How the weight is quantized.
            shape: Shape of the weight.
            to_matrix: Returns a tensor of this shape as a matrix (rows, columns).
        """
        blocks = scheme.blocks(shape)

        def columns_first(x: torch.Tensor) -> torch.Tensor:
            """One number per block to one per value, (columns, rows)."""
            whole = blocks.spread(x.float()).expand(blocks.view)
            return to_matrix(blocks.join(whole).reshape(shape)).T.contiguous()

        zeros = None
        if zero_point is not None and not (scheme.symmetric and scheme.fmt.signed):
            zeros = columns_first(zero_point)
        return cls(
            Factors(columns_first(scale), columns_first(scale.float().reciprocal()), zeros), scheme
        )

    def __call__(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the rounded values of a column."""
        return round_trip(x.clone(), self._columns[column], self.scheme)

    def select_rows(self, rows: torch.Tensor) -> ColumnRounder:
        """Return the rounding of some rows of every column."""
        return ColumnRounder(self.factors.select_rows(rows), self.scheme)

    def round_rows(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        hessian: torch.Tensor,
        attempt: Attempt,
        multiples: Sequence[float] = (1.0,),
    ) -> torch.Tensor:
        """Return some rows rounded by a function once: the scales are final."""
        return attempt(target, self.select_rows(rows))


class ZeroKeepingRounder:
    """Rounds columns of a pruned matrix, whose zeros stay zero; see ``ColumnRounding``.

    Attributes:
        rounding: Rounds the other values.
        zeros: Which values are zero, (rows, columns) bool.
    """

    def __init__(self, rounding: ColumnRounding, zeros: torch.Tensor) -> None:
        self.rounding, self.zeros = rounding, zeros
        self._columns = zeros.T.contiguous().unbind()

    def __call__(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the rounded values of a column."""
        return self.rounding(x, column).masked_fill(self._columns[column], 0.0)

    def select_rows(self, rows: torch.Tensor) -> ZeroKeepingRounder:
        """Return the rounding of some rows of every column."""
        return ZeroKeepingRounder(self.rounding.select_rows(rows), self.zeros[rows])

    def round_rows(
        self,
        rows: torch.Tensor,
        target: torch.Tensor,
        hessian: torch.Tensor,
        attempt: Attempt,
        multiples: Sequence[float] = (1.0,),
    ) -> torch.Tensor:
        """Return some rows rounded by a function as the other rounding does; zeros stay zero."""

        def keeping_zeros(targets: torch.Tensor, own: ColumnRounding) -> torch.Tensor:
            zeros = self.zeros[rows].repeat(len(targets) // len(target), 1)
            return attempt(targets, ZeroKeepingRounder(own, zeros))

        return self.rounding.round_rows(rows, target, hessian, keeping_zeros, multiples)
