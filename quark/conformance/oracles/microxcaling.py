"""MX blocks of microxcaling, the emulation library of the authors of the MX specification."""

from __future__ import annotations

from collections.abc import Iterator

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import blocks
from quark.conformance.results import in_blocks, mx_scheme
from quark.conformance.samples import BLOCK, block_values
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scales import largest_value

ELEMENTS = {
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp6_e3m2": "fp6_e3m2",
    "fp6_e2m3": "fp6_e2m3",
    "fp4": "fp4_e2m1",
}


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare MX blocks whose exponents are rounded down, ties of elements to even.

    Args:
        every: Take one value of so many.
    """
    from mx.mx_ops import _quantize_mx

    x = block_values(every)
    for name, element in ELEMENTS.items():
        fmt = Dtype[name].value
        theirs = _quantize_mx(x.clone(), 8, element, axes=[-1], block_size=BLOCK, round="even")
        wanted = blocks(x, fmt, "floor", largest_value(x.dtype))
        ours = in_blocks(x, mx_scheme(fmt, "floor"))
        yield compare(name, "MX blocks, floor", ours, wanted, theirs, x)
