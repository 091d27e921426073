"""Values that are compared: all values of 16-bit floats, and the numeric extremes of a format."""

from __future__ import annotations

import torch

from quark.conformance.definitions import magnitudes
from quark.torch.numerics.formats import Format, TableFormat

PATTERNS = 1 << 16
BLOCK = 32


def half_values(every: int = 1) -> torch.Tensor:
    """Return every value of bfloat16 and float16, infinities included, (n) float32.

    Args:
        every: Take one bit pattern of so many.
    """
    bits = torch.arange(0, PATTERNS, every, dtype=torch.int32).to(torch.int16)
    values = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()])
    return values[~values.isnan()]


def extremes(fmt: Format) -> torch.Tensor:
    """Return the extremes of a format, (n) float32.

    They are all its values and the middles between them, for at most 8 bits; its largest value and
    what lies beyond; both zeros; subnormal numbers and the ends of the exponents of float32; each
    between its neighbours in float32; infinities.
    """
    if isinstance(fmt, TableFormat):
        values = torch.tensor(fmt.values, dtype=torch.float64)
    elif fmt.is_float:
        values = torch.from_numpy(magnitudes(fmt))[: 1 << 8]
    else:
        values = torch.arange(min(fmt.qmax, 1 << 8) + 1, dtype=torch.float64)
    largest = fmt.max_value if fmt.is_float else float(fmt.qmax)
    beyond = [largest, largest * 1.03, largest * 1.1, largest * 2, 3.4e38]
    ends = [1e-45, 2.0**-149, 2.0**-126, 2.0**-127, 2.0**127, fmt.max_value]
    single = torch.tensor([0.0, *beyond, *ends], dtype=torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, single]).float()
    points = torch.cat([points, -points])
    infinity = torch.full_like(points, torch.inf)
    around = [points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity)]
    return torch.cat([*around, infinity[:1], -infinity[:1]])


def block_values(every: int = 1) -> torch.Tensor:
    """Return blocks whose largest values are all positive finite bfloat16, (n, 32) float32.

    The other values are products with numbers between -1 and 1, as bfloat16, always the same.

    Args:
        every: Take one bit pattern of so many.
    """
    bits = torch.arange(1, 0x7F80, every, dtype=torch.int32).to(torch.int16)
    amax = bits.view(torch.bfloat16).float().unsqueeze(-1)
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(len(bits), BLOCK, generator=generator) * 2 - 1
    factors[:, 0] = torch.where(torch.arange(len(bits)) % 2 == 0, 1.0, -1.0)
    factors[:, 1] = 0.0
    return (amax * factors).bfloat16().float()


def usual_values(rows: int, columns: int) -> torch.Tensor:
    """Return normal numbers, each row times a power of two, (rows, columns) float32."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randint(-9, 9, (rows, 1), generator=generator)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(factors.float())
