"""Products of two matrices in bfloat16 or float16 with a result in float32.

Matrix units of accelerators multiply these types several times faster than float32. Their products
have at most 22 bits, so each is exact in float32, and sums are in float32 either way.
"""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

_TYPES = (torch.bfloat16, torch.float16)
_SAMPLE = 2, 4096, 32  # matrices, rows, columns
_TOLERANCE = 2.0**-15  # of the largest sum; results in half types are off by 2^-9 or 2^-12


def multiplies_halves(x: torch.Tensor) -> bool:
    """Whether the device of ``x`` multiplies its type with results in float32, and right.

    The first answer for a device and a type is kept for this process; a wrong result is logged.
    """
    return x.dtype in _TYPES and _is_proved(x.device, x.dtype)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return aᵀ b in float32, given (rows, m) and (rows, n) or several of each.

    See ``multiplies_halves`` for the tensors it takes.
    """
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    result: torch.Tensor = multiply(a.mT, b, out_dtype=torch.float32)
    return result


@lru_cache(maxsize=64)
def _is_proved(device: torch.device, dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    sample = torch.randn(*_SAMPLE, generator=random, dtype=torch.float32, device="cpu").to(dtype)
    expected = sample.double().mT @ sample.double()
    on_device = sample.to(device)
    try:
        products = product(on_device, on_device), product(on_device[0], on_device[0])[None]
        errors = [(p.cpu() - expected[: len(p)]).abs().max() for p in products]
    except (RuntimeError, TypeError) as refusal:  # CPUs and older devices refuse, and older torch
        logger.debug("No products of %s in float32 on %s: %s", dtype, device, refusal)
        return False
    error = float(torch.stack(errors).max() / expected.abs().max())
    if not error <= _TOLERANCE:
        logger.warning("Products of %s are wrong on %s, by %.2g; not used.", dtype, device, error)
        return False
    return True
