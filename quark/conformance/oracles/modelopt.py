"""NVFP4 tensors of ModelOpt."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import nearest, two_level_blocks
from quark.conformance.results import in_blocks, mx_scheme, nvfp4_scheme
from quark.conformance.samples import block_values, usual_values
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.qdq import dequantize, quantize


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare NVFP4 tensors, and MXFP8 elements under its scales.

    Its exponents of MXFP8 are those of amax / 448, rounded up, which no mode here gives. Its scales
    are taken as they are, and elements are compared.

    Args:
        every: Take one value of so many.
    """
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    x = usual_values(512, 64)
    tensor, scale, tensor_scale = NVFP4QTensor.quantize(x.clone(), 16)
    values = tensor.dequantize(
        torch.float32, scale=scale, double_scale=tensor_scale, block_sizes={-1: 16}
    )
    wanted = two_level_blocks(x.reshape(-1, 16), Dtype.fp4.value, Dtype.fp8_e4m3.value)
    yield compare("fp4", "NVFP4", in_blocks(x, nvfp4_scheme()), wanted, values, x)
    fmt = Dtype.fp8_e4m3.value
    x = block_values(every)
    tensor, exponents = MXFP8QTensor.quantize(x)
    factor = torch.exp2(exponents.double() - 127)
    values = tensor.dequantize(torch.float32, scale=exponents)
    scheme = mx_scheme(fmt)
    scale = factor.float().reshape(scheme.scale_shape(x.shape))
    ours = dequantize(quantize(x, scale, None, scheme), scale, None, scheme)
    elements = nearest(x.double() / factor.reshape(-1, 1), fmt)
    wanted = (elements * factor.reshape(-1, 1)).float()  # the largest may be infinite
    yield compare("fp8_e4m3", "MXFP8 under given scales", ours, wanted, values, x)
