"""Casts of ml_dtypes, which numpy, JAX and ONNX use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import nearest
from quark.conformance.results import rounded
from quark.conformance.samples import extremes, half_values
from quark.torch.numerics.codec import decode
from quark.torch.numerics.exponents import power_of_two
from quark.torch.numerics.formats import Dtype

TYPES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp6_e3m2": "float6_e3m2fn",
    "fp6_e2m3": "float6_e2m3fn",
    "fp4": "float4_e2m1fn",
    "bfloat16": "bfloat16",
}


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare casts of values within the range, values of codes, and exponents of scales.

    Args:
        every: Take one value of so many.
    """
    import ml_dtypes

    for name, type_name in TYPES.items():
        kind = getattr(ml_dtypes, type_name)
        fmt = Dtype[name].value
        x = torch.cat([half_values(every), extremes(fmt)]).clamp(-fmt.max_value, fmt.max_value)
        theirs = torch.from_numpy(x.numpy().astype(kind).astype(np.float32))
        yield compare(name, "cast", rounded(x, fmt), nearest(x, fmt), theirs, x)
        if fmt.is_encoded:
            codes = np.arange(1 << fmt.bits, dtype=np.uint8)
            values = torch.from_numpy(codes.view(kind).astype(np.float32))
            ours = decode(torch.from_numpy(codes), fmt)
            yield compare(name, "values of codes", ours, values)
    exponents = np.arange(255, dtype=np.uint8)  # 255 is NaN
    powers = torch.from_numpy(exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ours = power_of_two(torch.from_numpy(exponents).int() - 127)
    yield compare("E8M0", "values of codes", ours, powers)
