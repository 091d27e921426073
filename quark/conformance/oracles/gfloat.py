"""Rounding of gfloat, a library of float formats by their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import blocks, nearest
from quark.conformance.results import in_blocks, mx_scheme, rounded
from quark.conformance.samples import block_values, extremes, half_values
from quark.torch.numerics.codec import decode
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.exponents import power_of_two
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scales import largest_value

FORMATS = {
    "fp8_e4m3": "ocp_e4m3",
    "fp8_e5m2": "ocp_e5m2",
    "fp6_e3m2": "ocp_e3m2",
    "fp6_e2m3": "ocp_e2m3",
    "fp4": "ocp_e2m1",
    "float16": "binary16",
    "bfloat16": "bfloat16",
}
MODES = {
    RoundType.half_even: "TiesToEven",
    RoundType.round: "TiesToAway",
    RoundType.floor: "TowardNegative",
}
BLOCKS = {
    "fp8_e4m3": "mxfp8_e4m3",
    "fp8_e5m2": "mxfp8_e5m2",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp4": "mxfp4_e2m1",
}
BLOCKS_STEP = 199  # it rounds one value at a time


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare rounding in every mode, saturating; values of codes; MX blocks.

    Args:
        every: Take one value of so many.
    """
    import gfloat
    from gfloat import formats

    infos = {name: getattr(formats, f"format_info_{theirs}") for name, theirs in FORMATS.items()}
    for name, info in {**infos, "fp8_e5m3": _e5m3()}.items():
        fmt = Dtype[name].value
        x = torch.cat([half_values(every), extremes(fmt)])
        x = x if fmt.signed else x[x > 0]
        for mode, their_mode in MODES.items():
            if fmt.scaled or mode is RoundType.half_even:
                values = gfloat.round_ndarray(
                    info, x.double().numpy(), gfloat.RoundMode[their_mode], sat=True
                )
                given = nearest(x, fmt, mode), torch.from_numpy(values)
                yield compare(name, f"round, {mode.name}", rounded(x, fmt, mode), *given, x)
        if fmt.is_encoded:
            codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
            values = gfloat.decode_ndarray(info, codes.numpy())
            yield compare(name, "values of codes", decode(codes, fmt), torch.from_numpy(values))
    exponents = np.arange(255, dtype=np.uint8)  # 255 is NaN
    powers = torch.from_numpy(gfloat.decode_ndarray(formats.format_info_ocp_e8m0, exponents))
    ours = power_of_two(torch.from_numpy(exponents).int() - 127)
    yield compare("E8M0", "values of codes", ours, powers)
    x = block_values(BLOCKS_STEP * every)
    for name, theirs in BLOCKS.items():
        fmt, info = Dtype[name].value, getattr(formats, f"format_info_{theirs}")
        rows = [
            gfloat.quantize_block(info, row, gfloat.compute_scale_amax)
            for row in x.double().numpy()
        ]
        wanted = blocks(x, fmt, "floor", largest_value(x.dtype))
        ours = in_blocks(x, mx_scheme(fmt, "floor"))
        yield compare(name, "MX blocks, floor", ours, wanted, torch.from_numpy(np.stack(rows)), x)


def _e5m3() -> Any:
    """Return the parameters of fp8_e5m3, which gfloat has no name for: unsigned, one NaN."""
    from gfloat import FormatInfo
    from gfloat.types import Domain

    return FormatInfo(
        name="e5m3",
        k=8,
        precision=4,
        bias=15,
        is_signed=False,
        domain=Domain.Finite,
        has_nz=False,
        num_high_nans=1,
        has_subnormals=True,
        is_twos_complement=False,
    )
