"""Rounding for an error that is weighted on both sides, tr(O D H Dᵀ), as pure tensor functions.

D = W - Q is the error of a weight, (outputs, inputs). GPTQ is the case O = I, in which rows are
independent. Here each chunk of rows is rounded by GPTQ towards a target that makes up for the
errors of all rows that are rounded already.
"""

from __future__ import annotations

import torch

from quark.torch.algorithm.gptq_solver import (
    Inputs,
    descend_columns,
    descent_factor,
    inverse_factor,
    solve_columns,
)
from quark.torch.numerics.column_rounder import ColumnRounding

ROW_CHUNKS = 32  # chunks of rows; rows of one chunk do not compensate for each other
# Of the scales of a row, which are then fitted to the codes. From each of them GPTQ ends in another
# of many roundings that are nearly best.
MULTIPLES = (1.0, 0.97, 1.03, 0.94, 1.06, 0.91, 0.88, 1.1, 0.955, 1.045)
SWEEPS = 1  # over all chunks, after each has been rounded


def round_rows_and_columns(
    weight: torch.Tensor,
    inputs: Inputs,
    rounding: ColumnRounding,
    output_hessian: torch.Tensor,
    output_damping: float,
) -> torch.Tensor:
    """Return a weight rounded so that other columns and other rows compensate for errors.

    Rows are taken in order of decreasing diagonal of O. After each chunk of rows changed by D₁, the
    best remaining rows are W₂ - O₂₂⁻¹ O₂₁ D₁, whatever H is. So each chunk has its own target: it
    is rounded by GPTQ and by one sweep of coordinate descent, and its scales are fitted, before the
    rows behind it compensate for what is left. Then each chunk is rounded again by coordinate
    descent, and compensates for all others.

    Args:
        weight: (outputs, inputs) float32.
        inputs: See ``Solver``.
        rounding: See ``round_columns``.
        output_hessian: Sum O of g gᵀ, (outputs, outputs).
        output_damping: Fraction of the mean of its diagonal that is added to the diagonal.
    """
    # Example with 128 rows: 32 chunks of 4. Rows 0..3 (by importance) are rounded alone. With
    # F the factor of O (Fᵀ F = O⁻¹), S solves F₁₁ᵀ S = W₁ - Q₁, and W₂ becomes W₂ - F₁₂ᵀ S. This
    # is GPTQ's step from columns 0..3 to all later columns, here from rows to rows.
    rows = torch.argsort(output_hessian.diagonal(), descending=True, stable=True)
    ordered = output_hessian[rows][:, rows]
    row_factor = inverse_factor(ordered, output_damping)
    if row_factor is None:
        return solve_columns(weight, inputs, rounding)
    remaining, result = weight[rows], torch.empty_like(weight)
    descent = descent_factor(inputs)
    step = -(-len(rows) // ROW_CHUNKS)

    def solve(target: torch.Tensor, own: ColumnRounding) -> torch.Tensor:
        values = solve_columns(target, inputs, own)
        return descend_columns(values, target, inputs, descent, own)

    for start in range(0, len(rows), step):
        end = start + step
        chunk, target = rows[start:end], remaining[start:end]
        values = rounding.round_rows(chunk, target, inputs.hessian, solve, MULTIPLES)
        own_factor = row_factor[start:end, start:end].T
        solution = torch.linalg.solve_triangular(own_factor, target - values, upper=False)
        remaining[end:].addmm_(row_factor[start:end, end:].T, solution, alpha=-1)
        result[chunk] = values
    del remaining, row_factor
    ordered.diagonal().add_(output_damping * ordered.diagonal().mean())
    for _ in range(SWEEPS):
        _sweep_(result, weight, inputs, rounding, ordered, rows, descent)
    return result


def _sweep_(
    result: torch.Tensor,
    weight: torch.Tensor,
    inputs: Inputs,
    rounding: ColumnRounding,
    output_hessian: torch.Tensor,
    rows: torch.Tensor,
    descent: torch.Tensor,
) -> None:
    """Round each chunk of rows again by coordinate descent, towards what is best beside all others.

    With errors D₂ of all other rows, the best error of a chunk is - O₁₁⁻¹ O₁₂ D₂, so its target is
    W₁ + O₁₁⁻¹ O₁₂ D₂.

    Args:
        result: The rounded weight, which is changed.
        weight: (outputs, inputs) float32.
        inputs: See ``Solver``.
        rounding: See ``round_columns``.
        output_hessian: O with damping, with rows and columns in the order of ``rows``.
        rows: The order of rounding, (outputs,) int64.
        descent: ``descent_factor`` of the inputs.
    """
    errors = (weight - result)[rows]
    step = -(-len(rows) // ROW_CHUNKS)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        chunk, own = rows[part], output_hessian[part, part]
        others = output_hessian[part] @ errors - own @ errors[part]
        target = weight[chunk] + torch.linalg.solve_ex(own, others).result  # O is damped
        values = result[chunk]

        def descend(
            target: torch.Tensor, own: ColumnRounding, values: torch.Tensor = values
        ) -> torch.Tensor:
            return descend_columns(values, target, inputs, descent, own)

        result[chunk] = rounding.round_rows(chunk, target, inputs.hessian, descend)
        errors[part] = weight[chunk] - result[chunk]
