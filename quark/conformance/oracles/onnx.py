"""Test vectors of the ONNX standard for operators that quantize and cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.definitions import nearest
from quark.conformance.oracles.integer_products import PRODUCTS
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.qdq import dequantize, dynamic_qparams, quantize
from quark.torch.numerics.scheme import Scheme

# Type of an array -> name of the format.
FORMATS = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn": "fp4",
    **{name: name for name in ("int2", "uint2", "int4", "uint4", "int8", "uint8")},
    **{name: name for name in ("int16", "uint16")},
}
Arrays = list[Any]
# Name of the format, result here, and the definition where it is not the test's output.
Results = tuple[str, torch.Tensor] | tuple[str, torch.Tensor, torch.Tensor]


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare the outputs of every test of these operators whose types this package has.

    Args:
        every: Not used: the tests are few.
    """
    from onnx import helper

    for case in _collect():
        call, *rest = case.model.graph.node
        if rest or call.op_type not in OPERATORS:
            continue
        (inputs, outputs), *_ = case.data_sets
        attributes = {a.name: helper.get_attribute_value(a) for a in call.attribute}
        output = _array(outputs[0])
        ours = OPERATORS[call.op_type]([_array(x) for x in inputs], output, attributes)
        if ours is not None:
            name, *tensors = ours
            tensors.append(torch.from_numpy(output.astype(np.float64)))
            if Dtype[name].value.is_encoded:  # NaN has no code
                is_number = ~torch.from_numpy(_array(inputs[0]).astype(np.float64)).isnan()
                tensors = [x[is_number] for x in tensors]
            yield compare(name, case.name.removeprefix("test_"), *tensors)


def _collect() -> list[Any]:
    """Return the tests of the operators. Collecting those of all operators takes five seconds."""
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import (  # noqa: F401  # importing a module collects its tests
        cast,
        convinteger,
        dequantizelinear,
        dynamicquantizelinear,
        matmulinteger,
        qlinearconv,
        qlinearmatmul,
        quantizelinear,
    )

    return list(node._NodeTestCases)


def _array(given: Any) -> Any:
    """Return a tensor of a test as an array; types that numpy lacks are protocol buffers."""
    from onnx import TensorProto, numpy_helper

    is_buffer = isinstance(given, TensorProto)
    return numpy_helper.to_array(given) if is_buffer else np.asarray(given)


def _format(array: Any) -> str | None:
    return FORMATS.get(array.dtype.name)


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _codes(array: Any, name: str) -> torch.Tensor:
    """Return an array of codes as this package holds them."""
    fmt = Dtype[name].value
    if fmt.is_float:
        return torch.from_numpy(array.view(np.uint8).copy()).view(fmt.code_dtype)
    return torch.from_numpy(array.astype(np.int32)).to(fmt.code_dtype)


def _scheme(name: str, scale: Any, attributes: dict[str, Any]) -> Scheme:
    options: dict[str, Any] = {"symmetric": False}
    axis, size = attributes.get("axis", 1), attributes.get("block_size", 0)
    if size:
        options |= {"qscheme": QSchemeType.per_group, "axis": axis, "group": size}
    elif scale.size > 1:
        options |= {"qscheme": QSchemeType.per_channel, "axis": axis}
    return Scheme(Dtype[name].value, **options)


def _zero_point(arrays: Arrays, name: str) -> torch.Tensor | None:
    if len(arrays) < 3 or Dtype[name].value.is_float:
        return None
    return torch.from_numpy(arrays[2].astype(np.int32))


def _values(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Return codes as numbers: integers, or the values of floats under the scale 1."""
    one = torch.ones(())
    return dequantize(codes, one, None, Scheme(Dtype[name].value))


def _quantize(arrays: Arrays, output: Any, attributes: dict[str, Any]) -> Results | None:
    name = _format(output)
    if name is None:
        return None
    scheme = _scheme(name, arrays[1], attributes)
    x, scale, zeros = _tensor(arrays[0]), _tensor(arrays[1]), _zero_point(arrays, name)
    ours = _values(quantize(x, scale, zeros, scheme), name)
    if not scheme.fmt.is_float:
        return name, ours
    blocks = scheme.blocks(x.shape)
    return name, ours, nearest(blocks.join(blocks.split(x) / blocks.spread(scale)), scheme.fmt)


def _dequantize(arrays: Arrays, output: Any, attributes: dict[str, Any]) -> Results | None:
    name = _format(arrays[0])
    if name is None:
        return None
    scheme = _scheme(name, arrays[1], attributes)
    codes, zeros = _codes(arrays[0], name), _zero_point(arrays, name)
    dtype = torch.float16 if output.dtype == np.float16 else torch.float32
    return name, dequantize(codes, _tensor(arrays[1]), zeros, scheme, dtype)


def _dynamic(arrays: Arrays, output: Any, attributes: dict[str, Any]) -> Results | None:
    """Return codes here and by definition. The standard divides by the scale: ties differ."""
    x = _tensor(arrays[0])
    scheme = Scheme(Dtype.uint8.value, symmetric=False)
    lo, hi = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (hi - lo) / 255
    defined = ((x * scale.reciprocal()).round() - (lo / scale).round()).clamp(0, 255)
    return "uint8", quantize(x, *dynamic_qparams(x, scheme), scheme).float(), defined


def _cast(arrays: Arrays, output: Any, attributes: dict[str, Any]) -> Results | None:
    name = _format(output)
    is_float = arrays[0].dtype.name in ("float32", "float16")
    if name is None or not Dtype[name].value.is_float or not is_float:
        return None
    if not attributes.get("saturate", 1):
        return None
    x, fmt = _tensor(arrays[0]), Dtype[name].value
    ours = _values(quantize(x, torch.ones(()), None, Scheme(fmt)), name)
    return name, ours, nearest(x, fmt)


def _product(operator: str) -> Callable[[Arrays, Any, dict[str, Any]], Results | None]:
    """Return the function of an operator that multiplies codes."""

    def compute(arrays: Arrays, output: Any, attributes: dict[str, Any]) -> Results | None:
        name = "uint8" if operator.endswith("Integer") else str(_format(output))
        return name, PRODUCTS[operator](arrays, attributes)

    return compute


OPERATORS: dict[str, Callable[[Arrays, Any, dict[str, Any]], Results | None]] = {
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeLinear": _dynamic,
    "Cast": _cast,
    **{name: _product(name) for name in PRODUCTS},
}
