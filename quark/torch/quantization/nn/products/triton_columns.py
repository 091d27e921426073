"""Rounding of columns that compensate for errors, one Triton launch for a panel of columns.

Operation by operation, a column takes ten launches. The kernel is proved on the device before a
scheme uses it: rounded values bit for bit, and the errors by the equation that they solve.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from quark.torch.numerics.column_rounder import ColumnRounder, ColumnRounding, ZeroKeepingRounder
from quark.torch.numerics.qdq import Factors
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import triton_column_kernels
from quark.torch.quantization.nn.products.triton_functions import (
    launches_on,
    load_functions,
    log_once,
)
from quark.torch.quantization.nn.products.triton_inputs import Case

PANEL = 128  # columns of a launch
_ROWS = 32  # rows of a program
_PROVED = (70, 45)  # columns and rows of the proof, with remainders of both tiles
_TOLERANCE = 1e-5  # of an error in the proof, in units of the largest value


class PanelRounding(NamedTuple):
    """Rounds panels of the columns of a matrix.

    Attributes:
        factors: Scales and zero points of every value, (columns, rows).
        pruned: Which values stay zero, (columns, rows) bool, or None.
        scheme: How the matrix is quantized.
    """

    factors: Factors
    pruned: torch.Tensor | None
    scheme: Scheme

    @classmethod
    def of(cls, rounding: ColumnRounding) -> PanelRounding | None:
        """Return the rounding of panels for that of columns; None if the kernel has no such."""
        pruned = None
        if isinstance(rounding, ZeroKeepingRounder):
            pruned, rounding = rounding.zeros.T.contiguous(), rounding.rounding
        if not isinstance(rounding, ColumnRounder) or not rounding.scheme.fmt.has_rule:
            return None
        return cls(rounding.factors, pruned, rounding.scheme)

    def __call__(
        self,
        remaining: torch.Tensor,
        rounded: torch.Tensor,
        errors: torch.Tensor,
        factor: torch.Tensor,
        order: torch.Tensor,
        start: int,
        end: int,
        current: torch.Tensor | None = None,
    ) -> None:
        """Round columns ``start`` to ``end``; each changes the columns of the panel after it.

        Args:
            remaining: Values in the order of rounding, (columns, rows), which are not changed.
            rounded: Gets the rounded values, (columns, rows).
            errors: Gets the errors of the columns, (columns, rows).
            factor: Upper triangular factor, (columns, columns).
            order: Index of each column in the matrix, (columns,) int64.
            start: First column.
            end: First column after them, at most ``PANEL`` further.
            current: Values from which errors count, (columns, rows); None for those that remain.
        """
        rows = remaining.shape[1]
        scale, _, zeros = self.factors
        case = Case.of(self.scheme, torch.float32)
        with launches_on(remaining.device):
            launch = triton_column_kernels.round_panel[(-(-rows // _ROWS),)]
            tensors = remaining, current, rounded, errors, factor, order, scale, zeros, self.pruned
            sizes = start, end - start, rows, *factor.stride()
            tile = {"WIDTH": PANEL, "BLOCK_M": _ROWS}
            launch(*tensors, *sizes, CASE=case, **tile, enable_fp_fusion=False)


def panel_rounding(rounding: ColumnRounding, device: torch.device) -> PanelRounding | None:
    """Return the rounding of panels by a kernel; None if there is none, or if it is wrong.

    Args:
        rounding: Rounds one column.
        device: Device of the matrix.
    """
    panel = PanelRounding.of(rounding)
    if panel is None:
        return None
    has_zeros, is_pruned = panel.factors.zero_point is not None, panel.pruned is not None
    return panel if _is_right(panel.scheme, device, has_zeros, is_pruned) else None


@lru_cache(maxsize=256)
def _is_right(scheme: Scheme, device: torch.device, has_zeros: bool, is_pruned: bool) -> bool:
    """Whether the kernel rounds a sample right; a refusal is logged.

    The first answer is kept for this process.
    """
    if not load_functions(triton_column_kernels):
        return False
    try:
        problem = _problem(*_sample(scheme, device, has_zeros, is_pruned))
    except Exception as error:  # compilers and drivers fail in many ways
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    if problem:
        log_once(f"Columns in {scheme.fmt.name} are not rounded by Triton: {problem}.")
    return not problem


def _sample(
    scheme: Scheme, device: torch.device, has_zeros: bool, is_pruned: bool
) -> tuple[ColumnRounding, torch.Tensor, torch.Tensor]:
    """Return a rounding, and the values and the factor of a sample: every code, and ties."""
    random = torch.Generator().manual_seed(0)
    columns, rows = _PROVED
    scale = torch.rand(columns, rows, generator=random, dtype=torch.float32, device="cpu") + 0.5
    if scheme.scales_by_powers:
        scale = 2.0 ** torch.randint(-9, 3, (columns, rows), generator=random, device="cpu")
    fmt = scheme.fmt
    reach = fmt.max_value if fmt.is_float else float(fmt.qmax)
    values = torch.randn(columns, rows, generator=random, dtype=torch.float32, device="cpu")
    values *= reach / 2
    values[::2] = (values[::2] * 2).round() / 2  # ties of integers
    zeros = (
        torch.randint(0, 5, (columns, rows), generator=random, device="cpu").float()
        if has_zeros
        else None
    )
    if zeros is not None and scheme.float_zero_point:
        zeros += 0.3
    made = Factors(scale, scale.reciprocal(), zeros)
    moved = Factors(*(None if x is None else x.to(device) for x in made))  # type: ignore[arg-type]  # scales stay tensors
    rounding: ColumnRounding = ColumnRounder(moved, scheme)
    if is_pruned:
        chances = torch.rand(rows, columns, generator=random, dtype=torch.float32, device="cpu")
        rounding = ZeroKeepingRounder(rounding, (chances < 0.5).to(device))
    factor = torch.randn(columns, columns, generator=random, dtype=torch.float32, device="cpu")
    factor.triu_().div_(columns)
    diagonal = torch.rand(columns, generator=random, dtype=torch.float32, device="cpu")
    factor.diagonal().copy_(diagonal + 0.5)
    return rounding, (values * scale).to(device), factor.to(device)


def _problem(rounding: ColumnRounding, values: torch.Tensor, factor: torch.Tensor) -> str:
    """Return what is wrong with a panel, "" if nothing is.

    Args:
        rounding: Rounds one column.
        values: (columns, rows).
        factor: (columns, columns), upper triangular.
    """
    panel, count = PanelRounding.of(rounding), len(values)
    assert panel is not None
    order = torch.arange(count - 1, -1, -1, device=values.device)
    rounded, errors = torch.empty_like(values), torch.empty_like(values)
    # Columns that change no other one are rounded alone.
    identity = torch.eye(count, dtype=torch.float32, device=values.device)
    panel(values, rounded, errors, identity, order, 0, count)
    for i, index in enumerate(order.tolist()):
        if not torch.equal(rounded[i], rounding(values[i], index)):
            return "its values for a sample differ from those of single columns"
    # With R the upper triangle of the factor U, Uᵀ e = w - q.
    panel(values, rounded, errors, factor, order, 0, count)
    left = factor.double().T @ errors.double() - (values.double() - rounded.double())
    worst = (left.abs().max() / values.abs().max()).item()
    return "" if worst <= _TOLERANCE else f"the errors of a sample are wrong by {worst:.2g}"
