"""Whether all values of a tensor are finite."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from quark.torch.numerics.native.ranges import find_extremes, find_largest


def is_finite(x: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, by one pass without a temporary tensor."""
    return bool(_flag_finite(x)) if _may_be_infinite(x) else True


def find_infinite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinite values, None if there is none.

    The CPU waits once for each device.
    """
    flags: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        if _may_be_infinite(x):
            flags.setdefault(x.device, {})[name] = _flag_finite(x)
    infinite = {
        name
        for by_name in flags.values()
        for name, flag in zip(by_name, torch.stack([*by_name.values()]).tolist(), strict=True)
        if not flag
    }
    return next((name for name in tensors if name in infinite), None)


def _may_be_infinite(x: torch.Tensor) -> bool:
    return x.numel() > 0 and x.is_floating_point()


def _flag_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all values are finite, [] bool on the device of the tensor."""
    x = x.detach()
    least = _least_infinite(x.dtype) if x.itemsize == 1 else 0
    if least:
        stored = x.view(torch.uint8)
        largest = find_largest(stored, 127)
        if largest is None:
            return (stored & 127).max() < least
        return torch.tensor(largest < least, device="cpu")
    ends = find_extremes(x.view(-1), (0,)) if x.is_contiguous() else None
    if ends is None:
        ends = (x.float() if x.itemsize == 1 else x).aminmax()
    return torch.stack(ends).isfinite().all()


@cache
def _least_infinite(dtype: torch.dtype) -> int:
    """Return the smallest code without its sign that is NaN or infinite, for a type of one byte.

    Values are then compared as bytes, without a copy in float32. Example: those codes are 0x7F and
    0xFF of float8_e4m3fn, 0x7C to 0x7F and 0xFC to 0xFF of float8_e5m2.

    Returns:
        The code; 0 if the largest of all codes without their signs does not tell.
    """
    codes = torch.arange(128, dtype=torch.uint8, device="cpu")
    is_bad = ~codes.view(dtype).float().isfinite()
    is_symmetric = torch.equal(is_bad, ~(codes + 128).view(dtype).float().isfinite())
    least = 128 - int(is_bad.sum())
    return least if is_symmetric and least < 128 and bool(is_bad[least:].all()) else 0


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
