"""The definitions themselves: searches in float64, with nothing else installed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark.conformance import definitions
from quark.conformance.comparison import Comparison, compare
from quark.conformance.results import (
    MX_FLOATS,
    SHARED_EXPONENTS,
    floats,
    in_blocks,
    integers,
    mx_scheme,
    nvfp4_scheme,
    rounded,
    shared_exponent_scheme,
    through_codes,
)
from quark.conformance.samples import block_values, extremes, half_values, usual_values
from quark.torch.export.formats.layouts.dense_words import pack_bytes
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scales import largest_value

SCALE_MODES = ("even", "floor", "ceil")


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare rounding, codes, blocks and packed words with their definitions.

    Args:
        every: Take one value of so many.
    """
    halves = half_values(every)
    for name in [*floats(), *integers()]:
        fmt = Dtype[name].value
        values = torch.cat([halves, extremes(fmt)])
        nan = torch.tensor([torch.nan])
        # Formats that are plain casts have one mode.
        for mode in RoundType if fmt.scaled else [RoundType.half_even]:
            given = torch.cat([values, nan]) if fmt.is_float else values
            wanted = definitions.nearest(given, fmt, mode)
            ours = rounded(given, fmt, mode)
            ours = ours if fmt.is_float and fmt.signed else ours + 0.0
            yield compare(name, f"round, {mode.name}", ours, wanted, inputs=given)
            if fmt.scaled:
                ours = through_codes(values, fmt, mode)
                ours = ours if fmt.is_float and fmt.signed else ours + 0.0
                wanted = definitions.nearest(values, fmt, mode)
                yield compare(name, f"codes, {mode.name}", ours, wanted, inputs=values)
    yield from _blocks(every)
    for bits in range(2, 9):
        yield _words(bits)


def _blocks(every: int) -> Iterator[Comparison]:
    blocks = block_values(every)
    for name in MX_FLOATS:
        fmt = Dtype[name].value
        for mode in SCALE_MODES:
            for dtype in (torch.float32, torch.bfloat16):
                x = blocks.to(dtype)
                wanted = definitions.blocks(blocks, fmt, mode, largest_value(dtype))
                ours = in_blocks(x, mx_scheme(fmt, mode))
                kind = str(dtype).removeprefix("torch.")
                operation = f"MX blocks of {kind}, {mode}"
                yield compare(name, operation, ours, wanted.to(dtype), inputs=x)
    for name in SHARED_EXPONENTS:
        fmt = Dtype[name].value
        for dtype in (torch.float32, torch.bfloat16):
            x = blocks.to(dtype)
            wanted = definitions.shared_exponent_blocks(blocks, fmt).to(dtype)
            ours = in_blocks(x, shared_exponent_scheme(fmt))
            kind = str(dtype).removeprefix("torch.")
            yield compare(name, f"blocks of {kind}", ours + 0.0, wanted, inputs=x)
    x = usual_values(512, 64)
    wanted = definitions.two_level_blocks(
        x.reshape(-1, 16), Dtype.fp4.value, Dtype.fp8_e4m3.value
    ).reshape(x.shape)
    yield compare("fp4", "NVFP4", in_blocks(x, nvfp4_scheme()), wanted, inputs=x)


def _words(bits: int) -> Comparison:
    """Compare the bytes of codes without gaps."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (64, 64), generator=generator)
    codes[0, :2] = torch.tensor([0, (1 << bits) - 1])
    rows = definitions.words(codes, bits, 64 * bits // 8)
    wanted = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    ours = pack_bytes(codes.to(torch.uint8), bits)
    return compare(f"uint{bits}", "bytes without gaps", ours, wanted)
