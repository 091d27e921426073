"""Whether all values of a tensor are finite."""

from __future__ import annotations

from collections.abc import Mapping

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


def has_nan(x: torch.Tensor) -> bool:
    """Whether a value is NaN. Values of one byte are compared as bytes, without a copy in float32.

    Example: the codes of float8_e4m3fn that are NaN are 0x7F and 0xFF, those of float8_e5m2 0x7D to
    0x7F and 0xFD to 0xFF: the largest of all codes without their signs tells.
    """
    if not x.is_floating_point() or not x.numel():
        return False
    if x.itemsize == 1:
        codes = torch.arange(128, dtype=torch.uint8)
        is_nan = codes.view(x.dtype).float().isnan()
        least = 128 - int(is_nan.sum())
        is_symmetric = torch.equal(is_nan, (codes + 128).view(x.dtype).float().isnan())
        if is_symmetric and least < 128 and bool(is_nan[least:].all()):
            stored = x.detach().view(torch.uint8)
            largest = find_largest(stored, 127)
            return (int((stored & 127).max()) if largest is None else largest) >= least
    return bool((x.float() if x.itemsize == 1 else x).isnan().any())


def _may_be_infinite(x: torch.Tensor) -> bool:
    return x.numel() > 0 and x.is_floating_point()


def _flag_finite(x: torch.Tensor) -> torch.Tensor:
    """Return whether all values are finite, [] bool on the device of the tensor."""
    x = x.detach()
    ends = find_extremes(x.view(-1), (0,)) if x.is_contiguous() else None
    if ends is None:
        ends = (x.float() if x.itemsize == 1 else x).aminmax()
    return torch.stack(ends).isfinite().all()


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
