"""Casts and integer quantization of torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import nearest
from quark.conformance.results import floats, rounded
from quark.conformance.samples import half_values, usual_values
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.qdq import fake_quantize
from quark.torch.numerics.scheme import Scheme


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare with casts to the types of torch, and with its fake quantization.

    Casts do not saturate: values are limited to the range first.

    Args:
        every: Take one value of so many.
    """
    for name in floats():
        fmt = Dtype[name].value
        if fmt.native is not None:
            x = half_values(every).clamp(-fmt.max_value, fmt.max_value)
            cast = x.to(fmt.code_dtype).float()
            yield compare(name, "cast", rounded(x, fmt), nearest(x, fmt), cast, x)
    x = usual_values(256, 64)
    for name in ("int8", "uint8", "int4", "uint4"):
        fmt = Dtype[name].value
        for scale in (0.1, 0.25, 1 / 3, 3e-3):
            factor = torch.tensor(scale)
            zero = torch.tensor(0 if fmt.signed else 1 << (fmt.bits - 1), dtype=torch.int32)
            ours = fake_quantize(x.clone(), factor, zero, Scheme(fmt, symmetric=False))
            limits = fmt.qmin, fmt.qmax
            theirs = torch.fake_quantize_per_tensor_affine(x, factor, zero, *limits)
            yield compare(name, f"fake_quantize, scale {scale:.3g}", ours, theirs, inputs=x)
