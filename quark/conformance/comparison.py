"""One comparison: results of this package, results by definition, results of other software.

Three results of one operation tell who departs from the definition. Example, 3.5 in fp4, a tie
between 3 and 4 that goes to the even code, 4::

    ours  definition  theirs
    4     4           3       a deviation of the other software
    3     4           4       a difference of this package
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Comparison(NamedTuple):
    """Result of one comparison.

    Attributes:
        format: Name of the number format.
        operation: What was done to the values.
        values: Number of values compared.
        differences: Values for which this package departs from the definition, or from the other
            software where that is the definition.
        deviations: Values for which the other software departs from the definition.
        example: The first value of either kind, or "".
    """

    format: str
    operation: str
    values: int
    differences: int
    deviations: int
    example: str = ""


def compare(
    fmt: str,
    operation: str,
    ours: torch.Tensor,
    defined: torch.Tensor,
    theirs: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> Comparison:
    """Compare results value by value, the sign of zeros included; NaN equals NaN.

    Args:
        fmt: Name of the number format.
        operation: What was done to the values.
        ours: Results of this package, any shape.
        defined: Results by definition, or those of other software where that is the definition.
        theirs: Results of other software, or None.
        inputs: The values, for the example, or None.

    Raises:
        ValueError: The numbers of results differ.
    """
    given = [x for x in (ours, defined, theirs) if x is not None]
    if len({x.numel() for x in given}) != 1:
        raise ValueError(f"{fmt}, {operation}: {[tuple(x.shape) for x in given]} do not compare.")
    own = _differs(ours, defined)
    other = torch.zeros_like(own) if theirs is None else _differs(theirs, defined)
    example = ""
    if own.any() or other.any():
        place = int((own if own.any() else other).nonzero()[0])
        named = {"of": inputs, "here": ours, "defined": defined, "theirs": theirs}
        parts = [f"{n} {x.flatten()[place].item():g}" for n, x in named.items() if x is not None]
        example = ", ".join(parts)
    return Comparison(fmt, operation, ours.numel(), int(own.sum()), int(other.sum()), example)


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return where two tensors differ, (n) bool."""
    one, other = (x.detach().flatten().double() for x in (one, other))
    same = (one == other) & (one.signbit() == other.signbit())
    return ~(same | (one.isnan() & other.isnan()))
