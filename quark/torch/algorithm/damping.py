"""Damping of a Hessian, chosen on data that is held back, in closed form.

Rounding with U, where Uᵀ U = (H + damping)⁻¹, changes a weight by D = E U: the errors e_i of the
columns, each spread over the columns after it (``gptq_solver``). Column i is rounded to a grid, so
that e_i U_ii has the variance of its step. With equal steps, the expected error tr(D H' Dᵀ) under
other data H' is, up to a factor,

    Σ_i (U H' Uᵀ)_ii / U_ii²

Weak damping fits H in directions in which data was scarce; strong damping forgets H. So H is that
of one fold of the data, and H' that of the other. Among dampings that are nearly as good, the
strongest loses least on text that calibration lacks.
"""

from __future__ import annotations

import torch

from quark.torch.algorithm.gptq_solver import inverse_factor

TRIED = (1.0, 0.3, 0.1, 0.03, 0.01)  # shares of the median of the diagonal, the strongest first
TOLERANCE = 1.02  # an error larger by less than this factor is as good


def choose_damping(
    hessian: torch.Tensor, fitted: torch.Tensor, held_out: torch.Tensor, least: float
) -> float:
    """Return the damping under which rounding loses least on data held out.

    Args:
        hessian: H of all data, (inputs, inputs), with a positive diagonal.
        fitted: H of the fold that is fitted, up to a factor.
        held_out: H of the other fold, up to a factor.
        least: Weakest damping.

    Returns:
        Fraction of the mean of the diagonal of H, at least ``least``, at most 1. Dampings are
        shares of the median of the diagonal, which a few channels with large values do not change.
    """
    # Example: errors 9, 5, 4.95 and 6 for the shares 1, 0.3, 0.1 and 0.03. The search ends at 0.03,
    # since the error has grown; 0.3 is within 2 % of the least error, so it is chosen.
    diagonal = hessian.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True)
    parts = [part[order][:, order] for part in (fitted, held_out)]
    unit = float(diagonal.median() / diagonal.mean())
    fractions = [min(share * unit, 1.0) for share in TRIED]
    errors: dict[float, float] = {}
    for fraction in [f for f in fractions if f > least] + [least]:
        error = expected_error(parts[0], parts[1], fraction)
        if error is None or (errors and error > min(errors.values()) * TOLERANCE):
            break
        errors[fraction] = error
    return next((f for f, e in errors.items() if e <= TOLERANCE * min(errors.values())), least)


def expected_error(fitted: torch.Tensor, held_out: torch.Tensor, damping: float) -> float | None:
    """Return Σ (U H' Uᵀ)_ii / U_ii², or None if H cannot be inverted under this damping.

    Args:
        fitted: H, (inputs, inputs), in the order in which columns are rounded.
        held_out: H', in the same order.
        damping: Fraction of the mean of the diagonal of H that is added to it.
    """
    factor = inverse_factor(fitted, damping)
    if factor is None:
        return None
    spread = (factor @ held_out).mul_(factor).sum(1)
    return float((spread / factor.diagonal().square()).sum())
