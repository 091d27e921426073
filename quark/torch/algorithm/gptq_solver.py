"""The mathematics of GPTQ (Frantar et al. 2023), as pure tensor functions.

A weight W with rounded values Q causes the squared error tr((W - Q) H (W - Q)ᵀ) of the outputs,
with H the mean of x xᵀ over the inputs x. Columns are rounded one after another. The remaining
columns change so that they compensate for the error of each as well as they can (algorithm 1).
With Uᵀ U = H⁻¹ and U upper triangular, column i has the error e_i = (w_i - q_i) / U_ii, and column
j > i becomes w_j - e_i U_ij.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from quark.torch.algorithm.leaf_rounding import Columns, by_columns, leaf_rounding
from quark.torch.numerics.column_rounder import ColumnRounding
from quark.torch.quantization.nn.products.triton_columns import (
    PANEL,
    PanelRounding,
    panel_rounding,
)

logger = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """Statistics of the inputs of a layer that solvers use.

    Attributes:
        hessian: H with damping, (inputs, inputs).
        factor: ``inverse_factor`` of H with rows and columns in ``order``.
        order: (inputs,) int64: index of the column to round first, second, …
    """

    hessian: torch.Tensor
    factor: torch.Tensor
    order: torch.Tensor


# Returns a weight rounded, both (outputs, inputs).
Solver = Callable[[torch.Tensor, Inputs, ColumnRounding], torch.Tensor]

# Type of a device -> what rounds a panel of columns in one launch there, if anything does. GPUs of
# AMD are "cuda" too.
PANELS: dict[str, Callable[[ColumnRounding, torch.device], PanelRounding | None]] = {
    "cuda": panel_rounding,
}
LEAF = 16  # ranges of so many columns are rounded column by column elsewhere
MIN_DAMPING = 1e-6  # float32 does not resolve smaller eigenvalues


def inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Return the upper triangular U with Uᵀ U = (H + damping · mean diagonal · I)⁻¹.

    The damping is multiplied by 10 until the matrix is positive definite in float32.

    Args:
        hessian: H, (inputs, inputs).
        damping: Fraction of the mean of the diagonal.

    Returns:
        U, (inputs, inputs), or None if the matrix cannot be inverted under any damping up to 1.
    """
    diagonal = hessian.diagonal().clone()
    mean = diagonal.mean()
    fraction = first = max(damping, MIN_DAMPING)
    while fraction <= 1:
        # Each matrix is dropped once it is not needed: they are the most memory of a run.
        hessian.diagonal().copy_(diagonal + fraction * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        hessian.diagonal().copy_(diagonal)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if bool((failed == 0) & upper.isfinite().all()):
                if fraction > first:
                    logger.warning("A Hessian is ill-conditioned: damped by %g.", fraction)
                result: torch.Tensor = upper
                return result
        fraction *= 10
    return None


def solve_columns(weight: torch.Tensor, inputs: Inputs, rounding: ColumnRounding) -> torch.Tensor:
    """Return the weight that ``round_columns`` rounds, (outputs, inputs)."""
    columns = _columns_of(weight, inputs.factor, inputs.order)
    _round_all(columns, rounding)
    return _to_rows(columns.rounded, columns.order).contiguous()


def round_columns(
    weight: torch.Tensor, factor: torch.Tensor, order: torch.Tensor, rounding: ColumnRounding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight column by column; the columns that follow compensate for each error.

    This is algorithm 1 of the paper. Ranges of columns are halved recursively instead of cut into
    blocks of one size, which gives the same result faster.

    Args:
        weight: (outputs, inputs) float32.
        factor: ``inverse_factor`` of the Hessian with rows and columns in ``order``.
        order: (inputs,) int64: index of the column to round first, second, …
        rounding: Rounds one column, given its index in the weight. Scales belong to that index,
            so groups keep their columns whatever the order.

    Returns:
        The rounded weight; and the errors e of the columns, (outputs, inputs), whose sum of squares
        is the damped error of the outputs.
    """
    # Example of an order: columns 0 and 1 form group 0, columns 2 and 3 form group 1, and the
    # diagonal of H is (1, 5, 9, 2) -> order (2, 1, 3, 0). Column 2 is rounded first, by the scale
    # of group 1. Its error goes into columns 1, 3, 0. All scales are final before the first step.
    columns = _columns_of(weight, factor, order)
    _round_all(columns, rounding)
    return _to_rows(columns.rounded, order).contiguous(), _to_rows(columns.errors, order)


def descent_factor(inputs: Inputs) -> torch.Tensor:
    """Return by how much one column should change if another one does, (inputs, inputs).

    If column i grows by d, the best value of column j, all others unchanged, falls by
    d H_ij / H_jj. Element (i, j) of the result is - H_ij / H_jj, in the order of rounding, and the
    diagonal is 1: errors and what follows from them then have the form of ``round_columns``.
    """
    factor = inputs.hessian.index_select(0, inputs.order).index_select(1, inputs.order)
    factor /= -factor.diagonal().clone()
    factor.diagonal().fill_(1.0)
    return factor


def descend_columns(
    values: torch.Tensor,
    target: torch.Tensor,
    inputs: Inputs,
    factor: torch.Tensor,
    rounding: ColumnRounding,
) -> torch.Tensor:
    """Round each column again, to the best codes while all other columns stay.

    This is one sweep of coordinate descent (Nair and Suggala 2024, CDQuant): no step increases the
    squared error tr((W - Q) H (W - Q)ᵀ) with the damped H, within the accuracy of float32.

    Args:
        values: Q, the rounded weight, (outputs, inputs).
        target: W, (outputs, inputs) float32.
        inputs: See ``Solver``.
        factor: ``descent_factor`` of these inputs.
        rounding: See ``round_columns``.

    Returns:
        The weight after the sweep, (outputs, inputs).
    """
    # With G = (Q - W) H, the error of column j is least at q_j - G_j / H_jj.
    slope = (values - target) @ inputs.hessian
    best = values - slope.div_(inputs.hessian.diagonal())
    columns = _columns_of(best, factor, inputs.order)
    columns = columns._replace(current=_to_columns(values, inputs.order))
    _round_all(columns, rounding)
    return _to_rows(columns.rounded, inputs.order).contiguous()


def _columns_of(weight: torch.Tensor, factor: torch.Tensor, order: torch.Tensor) -> Columns:
    """Return the columns of a weight before the first one is rounded."""
    remaining = _to_columns(weight, order)
    rounded, errors = torch.empty_like(remaining), torch.empty_like(remaining)
    return Columns(remaining, rounded, errors, factor, order)


def _to_columns(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a weight, (outputs, inputs), as columns in the order of rounding, (inputs, outputs).

    A column is contiguous then. Whole rows are picked faster than columns.
    """
    return weight.T.contiguous().index_select(0, order)


def _round_all(columns: Columns, rounding: ColumnRounding) -> None:
    """Round all columns, each after those before it in the order have changed it."""
    remaining, rounded, errors, factor, order, current = columns
    find_panel = PANELS.get(remaining.device.type)
    panel = None if find_panel is None else find_panel(rounding, remaining.device)
    if panel is not None:

        def round_panel(start: int, end: int) -> None:
            panel(remaining, rounded, errors, factor, order, start, end, current)

        _visit_leaves(remaining, errors, factor, 0, len(remaining), PANEL, PANEL, round_panel)
    else:
        round_leaf = leaf_rounding(columns, rounding)
        _visit_leaves(remaining, errors, factor, 0, len(remaining), LEAF, 1, round_leaf)


def _to_rows(columns: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return columns in the order of rounding, (inputs, outputs), as (outputs, inputs)."""
    position = torch.empty_like(order)  # inverse permutation: column -> step that rounded it
    position[order] = torch.arange(len(order), device=order.device)
    return columns[position].T


def prune_columns(
    weight: torch.Tensor,
    factor: torch.Tensor,
    width: int,
    select: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Set weights to zero column by column; the columns that follow compensate for each error.

    This is algorithm 1 of SparseGPT (Frantar and Alistarh 2023): the zeros of a block of columns
    are chosen when its turn comes, by the error (w / U_ii)² that each of them would cause.

    Args:
        weight: (outputs, inputs) float32.
        factor: ``inverse_factor`` of the Hessian.
        width: Columns of a block.
        select: Takes these errors, (outputs, up to ``width``), and returns which of the weights
            become zero, in the same shape.
    """
    remaining = weight.T.contiguous()
    pruned, errors = torch.empty_like(remaining), torch.empty_like(remaining)
    diagonal = factor.diagonal()
    order = torch.arange(len(remaining), device=weight.device)
    columns = Columns(remaining, pruned, errors, factor, order)

    def prune_block(start: int, end: int) -> None:
        scores = (remaining[start:end] / diagonal[start:end].unsqueeze(1)).square_()
        zeros = select(scores.T).T.contiguous()

        def prune(column: torch.Tensor, index: int) -> torch.Tensor:
            return column.masked_fill(zeros[index - start], 0.0)

        _visit_leaves(remaining, errors, factor, start, end, LEAF, 1, by_columns(columns, prune))

    _visit_leaves(remaining, errors, factor, 0, len(remaining), width, width, prune_block)
    return pruned.T.contiguous()


def _visit_leaves(
    remaining: torch.Tensor,
    errors: torch.Tensor,
    factor: torch.Tensor,
    start: int,
    end: int,
    width: int,
    step: int,
    visit: Callable[[int, int], None],
) -> None:
    """Change columns ``start`` to ``end``, which include the errors of all before ``start``.

    The right half receives the errors of the left half by one matrix product.

    Args:
        remaining: Columns in the order of rounding, (inputs, outputs).
        errors: Errors of the columns that are done, (inputs, outputs).
        factor: See ``round_columns``.
        start: First of the columns, a multiple of ``step``.
        end: First column behind them.
        width: Largest number of columns that ``visit`` changes at once.
        step: Ranges begin at multiples of it.
        visit: Changes the columns of a range, and computes their errors.
    """
    if end - start <= width:
        visit(start, end)
        return
    # Example: columns 128 to 300 in blocks of 128 -> 128 to 256, and 256 to 300.
    middle = -(-((start + end) // 2) // step) * step
    _visit_leaves(remaining, errors, factor, start, middle, width, step, visit)
    remaining[middle:end].addmm_(factor[start:middle, middle:end].T, errors[start:middle], alpha=-1)
    _visit_leaves(remaining, errors, factor, middle, end, width, step, visit)
