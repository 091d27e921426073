"""Whether all values of a tensor are finite."""

from __future__ import annotations

import torch


def is_finite(x: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, by one pass without a temporary tensor."""
    if not x.numel() or not x.is_floating_point():
        return True
    x = x.detach()
    return bool(torch.stack((x.float() if x.itemsize == 1 else x).aminmax()).isfinite().all())


def check_finite(name: str, x: torch.Tensor) -> None:
    """Check the values of a parameter.

    Raises:
        ValueError: One is NaN or infinite; the message has the name.
    """
    if not is_finite(x):
        raise ValueError(
            f"{name} has NaN or infinite values: the model is damaged, or it overflowed in "
            f"{x.dtype}. Repair it, or load it in a wider type."
        )
