"""Products of integer codes by ONNX Runtime: matrices and convolutions.

The definition is exact: sums of integers, then one rounding in float64. Under scales that are
powers of two, all codes are compared. Other scales are rounded themselves, so codes of values
beside a tie go either way, and are left out. On x86 CPUs without VNNI, ONNX Runtime adds pairs of
products of uint8 and int8 codes in 16 bits, which saturates. Of convolutions and MatMulInteger,
``PRECISE`` makes the sums exact; QLinearMatMul deviates there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from quark.conformance.comparison import Comparison, compare
from quark.conformance.oracles.integer_products import PRODUCTS, convolution

TYPES = (("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8"))
NEAR = 1e-3  # distance from a tie, in codes
PRECISE = "session.x64quantprecision"
SHIFT = 9  # sums of products are some 2^16


class Geometry(NamedTuple):
    """A convolution: weight (outputs, inputs of a group, height, width) and attributes of ONNX."""

    name: str
    weight: tuple[int, int, int, int]
    attributes: Mapping[str, Any]


GEOMETRIES = (
    Geometry("conv 3x3", (12, 8, 3, 3), {}),
    Geometry("conv 3x3, pads", (12, 8, 3, 3), {"pads": [1, 2, 0, 1]}),
    Geometry("conv 3x2, strides", (12, 8, 3, 2), {"strides": [2, 3]}),
    Geometry("conv 2x3, dilations", (12, 8, 2, 3), {"dilations": [2, 2], "pads": [1, 1, 1, 1]}),
    Geometry("conv 3x3, groups", (12, 4, 3, 3), {"group": 2}),
    Geometry("conv 3x3, depthwise", (8, 1, 3, 3), {"group": 8, "pads": [1, 1, 1, 1]}),
    Geometry("conv 1x1", (12, 8, 1, 1), {}),
)


def compare_all(every: int) -> Iterator[Comparison]:
    """Compare convolutions and products of random codes, both ends of their ranges among them.

    Args:
        every: Not used: the codes are few.
    """
    generator = np.random.default_rng(0)
    for x, weight in TYPES:
        for geometry in GEOMETRIES:
            arrays = (
                _codes(generator, x, (3, 8, 11, 10)),
                _codes(generator, weight, geometry.weight),
            )
            yield from _both("Conv", geometry.name, arrays, dict(geometry.attributes), generator)
        arrays = _codes(generator, x, (33, 70)), _codes(generator, weight, (70, 47))
        yield from _both("MatMul", "matmul", arrays, {}, generator)


def _codes(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    """Return codes of which a tenth are ends of the range."""
    limits = np.iinfo(name)
    codes = generator.integers(limits.min, limits.max, shape, endpoint=True)
    ends = generator.choice([limits.min, limits.max], shape)
    return np.where(generator.random(shape) < 0.1, ends, codes).astype(name)


def _both(
    kind: str, name: str, codes: Any, attributes: dict[str, Any], generator: np.random.Generator
) -> Iterator[Comparison]:
    """Compare the sums of products, and their codes under scales of both kinds."""
    zeros = [np.asarray(generator.integers(-9, 9) + _middle(c), c.dtype) for c in codes]
    if kind == "MatMul" or codes[0].dtype == np.uint8:  # it has no ConvInteger of signed inputs
        yield _integer(f"{kind}Integer", name, [*codes, *zeros], attributes)
    for is_exact in (True, False):
        arrays = _with_scales(kind, codes, zeros, is_exact, generator)
        yield _quantized(f"QLinear{kind}", name, arrays, attributes, is_exact)


def _middle(codes: Any) -> int:
    return 128 if codes.dtype == np.uint8 else 0


def _with_scales(
    kind: str, codes: Any, zeros: Any, is_exact: bool, generator: np.random.Generator
) -> list[Any]:
    """Return the inputs of an operator with scales, and of a convolution with a bias.

    A convolution has a scale for each output.
    """
    outputs = codes[1].shape[0] if kind == "Conv" else 1
    exponents = [generator.integers(-9, -3, count) for count in (1, outputs)]
    x, weight = (np.exp2(e).astype(np.float32) for e in exponents)
    if not is_exact:
        x, weight = (s * generator.uniform(1, 2, s.shape).astype(np.float32) for s in (x, weight))
    scale = np.exp2(SHIFT) * x * np.float32(np.exp2(np.round(np.log2(weight)).mean().round()))
    if kind == "MatMul":
        weight = weight.reshape(())
    zero = zeros[1] if kind == "MatMul" else np.broadcast_to(zeros[1], (outputs,)).copy()
    result = [codes[0], x.reshape(()), zeros[0], codes[1], weight, zero]
    result += [
        scale.astype(np.float32).reshape(()),
        np.asarray(_middle(codes[0]) + 3, codes[0].dtype),
    ]
    if kind == "Conv":
        result.append(generator.integers(-30_000, 30_000, outputs).astype(np.int32))
    return result


def _integer(operator: str, name: str, arrays: list[Any], attributes: dict[str, Any]) -> Comparison:
    """Compare sums of products of codes."""
    theirs = torch.from_numpy(_run(operator, arrays, attributes, np.int32))
    ours = PRODUCTS[operator](arrays, attributes)
    title = f"{operator}, {name}, {arrays[1].dtype} weights"
    return compare(arrays[0].dtype.name, title, ours, _sums(arrays, attributes), theirs)


def _quantized(
    operator: str, name: str, arrays: list[Any], attributes: dict[str, Any], is_exact: bool
) -> Comparison:
    """Compare codes of products, those of values beside a tie only if scales are exact."""
    x, x_scale, x_zero, weight, w_scale, w_zero, scale, zero, *bias = arrays
    single = w_zero.reshape(-1)[:1].reshape(())
    sums = _sums([x, weight, x_zero, single], attributes).numpy()
    along = (-1, 1, 1) if weight.ndim == 4 else ()
    if bias:
        sums = sums + bias[0].astype(np.float64).reshape(along)
    factor = x_scale.astype(np.float64) * w_scale.astype(np.float64).reshape(along)
    values = sums * factor / scale.astype(np.float64)
    limits = np.iinfo(zero.dtype)
    defined = np.clip(np.round(values) + int(zero), limits.min, limits.max)
    theirs = _run(operator, arrays, attributes, zero.dtype)
    results = PRODUCTS[operator](arrays, attributes).numpy(), defined, theirs
    if not is_exact:
        is_clear = np.abs(np.abs(values - np.floor(values)) - 0.5) > NEAR
        results = tuple(each[is_clear] for each in results)
    how = "powers of two" if is_exact else "any scales"
    title = f"{operator}, {name}, {weight.dtype} weights, {how}"
    return compare(x.dtype.name, title, *(torch.from_numpy(np.float64(r)) for r in results))


def _sums(arrays: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    """Return exact sums of products of codes: those of integers of 8 bits fit into float64."""
    x, weight, x_zero, w_zero = (torch.from_numpy(a.astype(np.float64)) for a in arrays)
    x, weight = x - x_zero, weight - w_zero
    if weight.dim() == 2:
        return x @ weight
    return convolution(x, weight, None, attributes)


def _run(operator: str, arrays: list[Any], attributes: dict[str, Any], output: Any) -> Any:
    """Return the output of an operator by ONNX Runtime on the CPU."""
    import onnxruntime
    from onnx import helper, numpy_helper

    names = [f"input_{i}" for i in range(len(arrays))]
    node = helper.make_node(operator, names, ["output"], **attributes)
    kinds = [helper.np_dtype_to_tensor_dtype(d) for d in (arrays[0].dtype, np.dtype(output))]
    shapes = arrays[0].shape, None
    ends = [
        helper.make_tensor_value_info(*each)
        for each in zip((names[0], "output"), kinds, shapes, strict=True)
    ]
    constants = [
        numpy_helper.from_array(np.ascontiguousarray(a).reshape(a.shape), name)
        for name, a in zip(names[1:], arrays[1:], strict=True)
    ]
    graph = helper.make_graph([node], "product", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    if arrays[0].dtype == np.uint8:  # it breaks convolutions of signed inputs
        options.add_session_config_entry(PRECISE, "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {names[0]: arrays[0]})[0]
