"""A few columns of a weight, rounded one by one; each error changes the columns after it.

Operations of torch do this for every rounding, and kernels of numba for integers and floats, with
the same bits. Torch rounds a product and a sum once in whole vectors, and twice in the
rows that are left. This is no promise of torch, so a kernel is proved before it is used: a sample
shows in which rows torch rounds once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from quark.torch.numerics.column_rounder import ColumnRounder
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.native.codes import float_constants
from quark.torch.numerics.native.column_kernels import (
    round_columns_to_floats,
    round_columns_to_integers,
)
from quark.torch.numerics.native.compilation import array, can_run, is_in_memory
from quark.torch.numerics.qdq import Factors
from quark.torch.numerics.scheme import Scheme

logger = logging.getLogger(__name__)

_MULTIPLES = (32, 16, 8)  # rows of the vectors in which torch may round once, widest first
_NEVER = 1 << 62  # no row is in such a vector
_MOST_BITS = 16  # of integer codes
_MOST_BITS_OF_FLOATS = 8
_LEAST_IN_MEMORY = 1 << 10  # of a weight or some rows of it
_PROVED = (7, 32 * 9 + 16 + 8 + 3)  # columns and rows of the proof, with a rest of every vector


class Columns(NamedTuple):
    """Columns of a weight in the order of rounding, each tensor (inputs, outputs) float32.

    Attributes:
        remaining: Values, changed by the errors of earlier columns.
        rounded: Rounded values.
        errors: Errors of the columns.
        factor: Upper triangular factor, (inputs, inputs).
        order: Index of each column in the weight, (inputs,) int64.
        current: Values from which errors count; None for those in ``remaining`` at the time.
    """

    remaining: torch.Tensor
    rounded: torch.Tensor
    errors: torch.Tensor
    factor: torch.Tensor
    order: torch.Tensor
    current: torch.Tensor | None = None


Leaf = Callable[[int, int], None]  # rounds columns, given the first and the one after the last


def leaf_rounding(columns: Columns, rounding: Callable[[torch.Tensor, int], torch.Tensor]) -> Leaf:
    """Return a function that rounds a few adjacent columns.

    Args:
        columns: All columns; those of a leaf include the errors of all before it.
        rounding: Rounds one column, given its index in the weight.
    """
    kernel = _kernel(columns, rounding)
    return by_columns(columns, rounding) if kernel is None else kernel


def by_columns(columns: Columns, rounding: Callable[[torch.Tensor, int], torch.Tensor]) -> Leaf:
    """Return a function that rounds columns by operations of torch; see ``leaf_rounding``."""
    remaining, rounded, errors, factor, order, current = columns
    given = remaining if current is None else current
    diagonal, indices = factor.diagonal().unbind(), order.tolist()

    def round_leaf(start: int, end: int) -> None:
        for i in range(start, end):
            column, error = remaining[i], errors[i]
            rounded[i] = values = rounding(column, indices[i])
            torch.sub(given[i], values, out=error).div_(diagonal[i])
            if i + 1 < end:
                remaining[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)

    return round_leaf


def _kernel(columns: Columns, rounding: Callable[[torch.Tensor, int], torch.Tensor]) -> Leaf | None:
    """Return a function that rounds columns by a kernel of numba, or None without a kernel."""
    if not isinstance(rounding, ColumnRounder) or not _is_served(rounding):
        return None
    # A solver calls the kernel for many columns, so few rows are worth it once numba is there.
    least = _LEAST_IN_MEMORY if is_in_memory() else None
    if columns.remaining.dtype != torch.float32 or not can_run(columns.remaining, least=least):
        return None
    has_zeros = rounding.factors.zero_point is not None
    multiple = _rows_rounded_once(rounding.scheme, has_zeros)
    return None if multiple is None else _by_kernel(columns, rounding, multiple)


def _is_served(rounding: ColumnRounder) -> bool:
    """Whether a kernel knows a rounding."""
    fmt, scheme = rounding.scheme.fmt, rounding.scheme
    if fmt.block or not fmt.has_rule or scheme.rounding is not RoundType.half_even:
        return False
    if fmt.is_float:
        return fmt.signed and fmt.bits <= _MOST_BITS_OF_FLOATS
    return fmt.bits <= _MOST_BITS and not scheme.divides


def _by_kernel(columns: Columns, rounding: ColumnRounder, multiple: int) -> Leaf:
    # Leaves have few columns and there are many of them, so tensors become arrays only once.
    given = columns.remaining if columns.current is None else columns.current
    values = [array(x) for x in (columns.remaining, given, columns.rounded, columns.errors)]
    factor, order = array(columns.factor), array(columns.order)
    fused = columns.remaining.shape[1] // multiple * multiple
    fmt, factors = rounding.scheme.fmt, rounding.factors
    scale, inverse, zeros = (None if x is None else array(x) for x in factors)
    constants = float_constants(fmt) if fmt.is_float else (float(fmt.qmin), float(fmt.qmax))
    adds_first = rounding.scheme.float_zero_point

    def round_leaf(start: int, end: int) -> None:
        leaf = slice(start, end)
        own = [x[leaf] for x in values] + [factor[leaf, leaf].copy()]
        if fmt.is_float:
            round_columns_to_floats(*own, scale, order[leaf], *constants, fused)
        else:
            by = scale, inverse, zeros
            round_columns_to_integers(*own, *by, order[leaf], *constants, adds_first, fused)

    return round_leaf


@lru_cache(maxsize=256)
def _rows_rounded_once(scheme: Scheme, has_zeros: bool) -> int | None:
    """Return the rows of vectors in which torch rounds a product and a sum once.

    Returns:
        The multiple of rows with which the kernel has the bits of torch for a sample; None if there
        is none, which is logged. The first answer is kept for this process.
    """
    values, factor, rounding = _sample(scheme, has_zeros)
    order = torch.arange(len(values) - 1, -1, -1, device="cpu")

    def result(multiple: int | None) -> torch.Tensor:
        given = values.clone(), torch.empty_like(values), torch.empty_like(values)
        columns = Columns(*given, factor, order)
        if multiple is None:
            by_columns(columns, rounding)(0, len(values))
        else:
            _by_kernel(columns, rounding, multiple)(0, len(values))
        return torch.stack(given).view(torch.int32)

    problem = "its values for a sample differ from those of torch"
    try:
        expected = result(None)
        for multiple in (*_MULTIPLES, _NEVER):
            if torch.equal(result(multiple), expected):
                return multiple
    except Exception as error:  # numba and LLVM have no common error; torch serves instead
        problem = str(error).strip().split("\n")[0] or type(error).__name__
    name = scheme.fmt.name
    logger.warning("Columns in %s are not rounded by a kernel of numba: %s.", name, problem)
    return None


def _sample(scheme: Scheme, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, ColumnRounder]:
    """Return values, (columns, rows), a factor and a rounding, which show what a kernel computes.

    A few values are ties, lie beyond the range, or are tiny numbers of both signs.
    """
    random = torch.Generator().manual_seed(0)
    count, rows = _PROVED
    fmt = scheme.fmt
    reach = fmt.max_value if fmt.is_float else float(fmt.qmax)
    scale = torch.rand(count, rows, generator=random, dtype=torch.float32, device="cpu") + 0.1
    if scheme.scales_by_powers:
        scale = 2.0 ** torch.randint(-9, 3, (count, rows), generator=random, device="cpu")
    ratios = torch.randn(count, rows, generator=random, dtype=torch.float32, device="cpu") * (
        reach / 2 + 1
    )
    ratios[:, ::3] = (ratios[:, ::3] * 4).round() / 4
    ratios[:, ::5] *= 1e-3
    zeros = None
    if has_zeros:
        zeros = torch.randint(
            fmt.qmin, fmt.qmax + 1, (count, rows), generator=random, device="cpu"
        ).float()
        if scheme.float_zero_point:
            zeros[:, 1::2] += 0.3
    factor = torch.randn(count, count, generator=random, dtype=torch.float32, device="cpu")
    factor.triu_().div_(count)
    diagonal = torch.rand(count, generator=random, dtype=torch.float32, device="cpu")
    factor.diagonal().copy_(diagonal + 0.5)
    rounding = ColumnRounder(Factors(scale, scale.reciprocal(), zeros), scheme)
    return ratios * scale, factor, rounding
