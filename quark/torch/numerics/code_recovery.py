"""Whether values that are rounded to a float type still give their codes back."""

from __future__ import annotations

import torch

from quark.torch.numerics.scheme import Scheme

_PRODUCTS = 2.0**-21  # relative error of float32 arithmetic on the way: 8 roundings


def recovers_codes(scale: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype) -> bool:
    """Whether ``recover_codes(fake_quantize(x))`` are the codes of x, for any x of a type.

    The value of a code is rounded to ``dtype``, with a relative error of at most 1 / (2^(m+1) + 1)
    for m bits of mantissa. The code is recovered if that, in steps of the codes, is less than half
    a step. Example: codes of int8 reach 128, and 128 / 257 = 0.498 in bfloat16; those of uint8
    reach 255, whose neighbor may be recovered. Between the values of a float format lie at least
    2^-(mantissa + 1) of the smaller. No value may be subnormal or infinite in ``dtype``.

    Args:
        scale: Scales that codes are multiplied by.
        scheme: How the tensor is quantized.
        dtype: Type of x and of the values.
    """
    fmt, limits = scheme.fmt, torch.finfo(dtype)
    if scale is None or not fmt.scaled or scheme.float_zero_point or not scale.numel():
        return False
    error = 1 / (2 / max(limits.eps, torch.finfo(torch.float32).eps) + 1) + _PRODUCTS
    if fmt.is_float:
        largest, step = fmt.max_value, fmt.smallest
        is_exact = error < fmt.separation / 2
    else:
        is_centred = scheme.symmetric and fmt.signed
        reach = max(-fmt.qmin, fmt.qmax) if is_centred else fmt.qmax - fmt.qmin
        largest, step = float(reach), 1.0
        is_exact = reach * error < 0.5
    if not is_exact or fmt.bits > 16:
        return False
    least, most = scale.abs().aminmax()
    return bool(least * step >= limits.smallest_normal) and bool(most * largest <= limits.max / 2)
