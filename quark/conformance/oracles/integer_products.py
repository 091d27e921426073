"""Products of integer codes as the operators of ONNX define them, by the functions of this package.

Each takes the inputs of the operator as arrays, and returns codes, or sums of products, as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, quantize
from quark.torch.numerics.scheme import Scheme

_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.int32)
Arrays = Sequence[Any]
Attributes = Mapping[str, Any]


def values_of(codes: Any, scale: Any, zero: Any) -> torch.Tensor:
    """Return the values of integer codes.

    Args:
        codes: Array of codes.
        scale: Array with one scale, or one for each index along the first axis.
        zero: Array of zero points, likewise.
    """
    fmt = Dtype[codes.dtype.name].value
    count = max(scale.size, zero.size)
    place: dict[str, Any] = {}
    if count > 1:
        place = {"qscheme": QSchemeType.per_channel, "axis": 0}
    shape = (count,) if count > 1 else ()
    by, at = (
        torch.from_numpy(np.broadcast_to(x.reshape(-1), (count,)).copy()) for x in (scale, zero)
    )
    return dequantize(
        torch.from_numpy(codes.astype(np.int32)).to(fmt.code_dtype),
        by.float().reshape(shape),
        at.to(torch.int32).reshape(shape),
        Scheme(fmt, symmetric=False, **place),
    )


def codes_of(values: torch.Tensor, scale: Any, zero: Any) -> torch.Tensor:
    """Return the codes of values, as numbers, under one scale; the zero point has their type."""
    by, at = torch.from_numpy(scale.copy()).reshape(()), torch.from_numpy(zero.astype(np.int32))
    scheme = Scheme(Dtype[zero.dtype.name].value, symmetric=False)
    return quantize(values, by, at.reshape(()), scheme).float()


def matmul_integer(arrays: Arrays, attributes: Attributes) -> torch.Tensor:
    """Return the sums of products of two matrices of codes."""
    a, b, *zeros = arrays
    a_zero, b_zero = (*zeros, _ZERO, _ZERO)[:2]
    return values_of(a, _ONE, a_zero) @ values_of(b, _ONE, b_zero)


def qlinear_matmul(arrays: Arrays, attributes: Attributes) -> torch.Tensor:
    """Return the codes of a product of two quantized matrices."""
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = arrays
    return codes_of(values_of(a, a_scale, a_zero) @ values_of(b, b_scale, b_zero), scale, zero)


def conv_integer(arrays: Arrays, attributes: Attributes) -> torch.Tensor:
    """Return the sums of products of a convolution of codes."""
    x, weight, *zeros = arrays
    x_zero, zero = (*zeros, _ZERO, _ZERO)[:2]
    return convolution(values_of(x, _ONE, x_zero), values_of(weight, _ONE, zero), None, attributes)


def qlinear_conv(arrays: Arrays, attributes: Attributes) -> torch.Tensor:
    """Return the codes of a quantized convolution, whose bias has the scale of the products."""
    x, x_scale, x_zero, weight, w_scale, w_zero, scale, zero, *biases = arrays
    factors = values_of(x, x_scale, x_zero), values_of(weight, w_scale, w_zero)
    bias = None
    if biases:
        bias = torch.from_numpy((biases[0] * (x_scale * w_scale)).astype(np.float32))
    return codes_of(convolution(*factors, bias, attributes), scale, zero)


def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, attributes: Attributes
) -> torch.Tensor:
    """Return a convolution over two axes with the attributes of ONNX; zeros pad the inputs."""
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    stride, dilation = (tuple(attributes.get(n, (1, 1))) for n in ("strides", "dilations"))
    return torch.nn.functional.conv2d(
        padded, weight, bias, stride, 0, dilation, attributes.get("group", 1)
    )


PRODUCTS: dict[str, Callable[[Arrays, Attributes], torch.Tensor]] = {
    "ConvInteger": conv_integer,
    "MatMulInteger": matmul_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
}
