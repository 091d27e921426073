"""Rounding of a matrix one column at a time, for solvers that correct the columns that follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch

from quark.torch.numerics.qdq import Factors, round_trip
from quark.torch.numerics.scheme import Scheme


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

    def refit(
        self, values: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor
    ) -> torch.Tensor:
        """Return rounded values under scales that fit a target better, where scales may change.

        Args:
            values: Rounded values, (rows, columns) float32.
            target: What they stand for, likewise.
            hessian: Weight of errors, (columns, columns), positive definite.
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

    def refit(
        self, values: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor
    ) -> torch.Tensor:
        """Return the values: the scales are final."""
        return values


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

    def refit(
        self, values: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor
    ) -> torch.Tensor:
        """Return the values under the scales of the other rounding; zeros stay zero."""
        return self.rounding.refit(values, target, hessian)
