"""MX and NVFP4 tensors of torchao."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import blocks, two_level_blocks
from quark.conformance.results import in_blocks, mx_scheme, nvfp4_scheme
from quark.conformance.samples import BLOCK, block_values, usual_values
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scales import largest_value

ELEMENTS = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp6_e3m2": "fp6_e3m2",
    "fp6_e2m3": "fp6_e2m3",
    "fp4": torch.float4_e2m1fn_x2,
}
MODES = ("even", "floor", "ceil")


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare dequantized tensors, with exponents of blocks rounded in every mode.

    Args:
        every: Take one value of so many.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = block_values(every)
    for name, element in ELEMENTS.items():
        fmt = Dtype[name].value
        for mode in MODES:
            theirs = ScaleCalculationMode[mode.upper()]
            tensor = MXTensor.to_mx(x, element, BLOCK, scaling_mode=theirs)
            wanted = blocks(x, fmt, mode, largest_value(x.dtype))
            ours = in_blocks(x, mx_scheme(fmt, mode))
            values = tensor.dequantize(torch.float32)
            yield compare(name, f"MX blocks, {mode}", ours, wanted, values, x)
    x = usual_values(512, 64)
    scale = per_tensor_amax_to_scale(x.abs().max())
    values = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    wanted = two_level_blocks(x.reshape(-1, 16), Dtype.fp4.value, Dtype.fp8_e4m3.value)
    ours = in_blocks(x, nvfp4_scheme())
    yield compare("fp4", "NVFP4", ours, wanted, values, x)
