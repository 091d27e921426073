"""Kernels of torch that multiply a few rows by packed weights, each proved on this machine.

They multiply in bfloat16 and round scales to it. Some processors sum 8-bit products in 16 bits,
which overflow, and the order in which a kernel expects codes differs from one processor to the
next. So a kernel is used only after it has computed a sample, with the largest codes among its
values, as plain arithmetic does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from quark.torch.numerics.formats import Dtype, Format
from quark.torch.quantization.nn.products.arrangement import Arrangement, Parts, pack_planes
from quark.torch.quantization.nn.products.panels import Panels

logger = logging.getLogger(__name__)

_GROUPS = (256, 128, 64, 32)  # group sizes of the kernel for 4 bits
_SAMPLE = 64  # outputs of the sample
_TOLERANCE = 2.0**-6  # of the largest output; bfloat16 alone is off by 2^-8


class Kernel(NamedTuple):
    """A kernel of torch for a few rows.

    Attributes:
        fmt: Format of the sample that it is proved with.
        half: Arrangement of the codes; see ``Arrangement``.
        group: Returns the group size that the kernel takes for panels with groups of a size, 0 if
            it does not fit them.
        factors: Returns scales and zero points as the kernel takes them.
        multiply: Returns x (rows, inputs) bfloat16 times the weight, (rows, padded outputs).
        few_rows: Rows up to which it is faster than panels of ``native`` that are multiplied in
            bfloat16, measured on an AMD Zen 4. Others are slower; see ``product.FEW_ROWS``.
    """

    fmt: Format
    half: int
    group: Callable[[Format, int, int], int]
    factors: Callable[[Panels, Parts], torch.Tensor]
    multiply: Callable[[Panels, Parts, torch.Tensor], torch.Tensor]
    few_rows: int


def _int4_group(fmt: Format, inputs: int, group: int) -> int:
    """Return the largest group size of the kernel that divides the groups of the weight."""
    if fmt.is_float or fmt.bits != 4:
        return 0
    return next((size for size in _GROUPS if group % size == 0), 0)


def _int4_factors(panels: Panels, parts: Parts) -> torch.Tensor:
    """Return (groups, outputs, 2): scale, and the value of code 8, which the kernel adds."""
    to = panels.arrangement
    scale = panels.scale(parts)
    eight = (8 - panels.zero_points(parts)) * scale
    factors = torch.stack([to.restore_factors(x) for x in (scale, eight)], -1)
    return factors.transpose(0, 1).bfloat16().contiguous()


def _multiply_int4(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    to = panels.arrangement
    codes = parts["plane_4"].view(to.panels * to.rows, -1)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, to.group, parts["factors"])  # type: ignore[no-any-return]


def _int8_group(fmt: Format, inputs: int, group: int) -> int:
    """Return the group size if it is a whole row."""
    is_int8 = not fmt.is_float and fmt.bits == 8 and fmt.signed
    return inputs if is_int8 and group == inputs else 0


def _int8_factors(panels: Panels, parts: Parts) -> torch.Tensor:
    """Return the scale of each output."""
    return panels.arrangement.restore_factors(panels.scale(parts)).flatten().bfloat16()


def _multiply_int8(panels: Panels, parts: Parts, x: torch.Tensor) -> torch.Tensor:
    to = panels.arrangement
    codes = parts["plane_8"].view(torch.int8).view(to.panels * to.rows, -1)
    return torch.ops.aten._weight_int8pack_mm(x, codes, parts["factors"])  # type: ignore[no-any-return]


# Device and name -> kernel. The first one that fits a weight and is proved multiplies it.
KERNELS: dict[tuple[str, str], Kernel] = {
    ("cpu", "int4, AVX-512"): Kernel(
        Dtype.uint4.value, 32, _int4_group, _int4_factors, _multiply_int4, 16
    ),
    ("cpu", "int4, AVX2"): Kernel(
        Dtype.uint4.value, 16, _int4_group, _int4_factors, _multiply_int4, 16
    ),
    ("cpu", "int8"): Kernel(Dtype.int8.value, 0, _int8_group, _int8_factors, _multiply_int8, 16),
}


def takes_zero_points(kernel: Kernel) -> bool:
    """Whether a kernel takes codes with a zero point."""
    return kernel.half > 0


@lru_cache(maxsize=256)
def is_proved(device: str, name: str, inputs: int, group: int) -> bool:
    """Whether a kernel computes a sample right, for rows of so many inputs in such groups.

    The first answer is kept for this process; a refusal is logged.
    """
    kernel = KERNELS[device, name]
    try:
        problem = _error(kernel, inputs, group)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        problem = str(error).split("\n")[0]
    if problem:
        logger.info("The kernel %r of torch is not used on this machine: %s.", name, problem)
    return not problem


def _error(kernel: Kernel, inputs: int, group: int) -> str:
    """Return what is wrong with the product of a sample, "" if nothing is."""
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(
        0, 1 << kernel.fmt.bits, (_SAMPLE, inputs), generator=random, device="cpu"
    ).byte()
    low, high = (kernel.fmt.qmin, kernel.fmt.qmax)
    bits[0], bits[1] = low & 0xFF, high & 0xFF  # largest sums, of both signs
    zero = 5 if takes_zero_points(kernel) else 0
    shape = _SAMPLE, inputs // group
    scale = torch.rand(shape, generator=random, dtype=torch.float32, device="cpu")
    scale = scale.bfloat16().float() + 0.5
    rows = _SAMPLE // 2 if kernel.half == 0 else 2 * kernel.half
    to = Arrangement(_SAMPLE, inputs, group, rows, kernel.half)
    panels = Panels(kernel.fmt, to, 0, zero)
    parts = pack_planes(to.arrange(bits), kernel.fmt) | {"scale": to.arrange_factors(scale)}
    parts["factors"] = kernel.factors(panels, parts)
    x = torch.randn(3, inputs, generator=random, dtype=torch.float32, device="cpu").bfloat16()
    x[0] = 100.0
    codes = bits.view(torch.int8) if kernel.fmt.signed else bits
    weight = (codes.double() - zero) * scale.double().repeat_interleave(group, 1)
    expected = x.double() @ weight.T
    for rows in (1, len(x)):
        error = (kernel.multiply(panels, parts, x[:rows]).double() - expected[:rows]).abs()
        relative = (error.amax(1) / expected[:rows].abs().amax(1)).max().item()
        if not relative <= _TOLERANCE:
            return f"the error of a sample of {inputs} inputs is {relative:.2g}"
    return ""
