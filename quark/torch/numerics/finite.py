"""Whether all values of a tensor are finite."""

from __future__ import annotations

import torch


def is_finite(x: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, by one pass without a temporary tensor."""
    if not x.numel() or not x.is_floating_point():
        return True
    x = x.detach()
    return bool(torch.stack((x.float() if x.itemsize == 1 else x).aminmax()).isfinite().all())
