"""Time to fake-quantize or observe one tensor, in this package and in other software.

``python operations.py '"name"' edge rounds``, run by the Python of a peer's environment, prints the
CPU milliseconds of each operation that it has. All find the scales of a float32 tensor (edge, edge)
and return the rounded values in float32; observers return scale and zero point.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import cpu_seconds

SLOW = 5.0  # seconds from which once is enough
COPY, FRESH_COPY = "copy to memory in use", "copy to fresh memory"
GROUPS: dict[str, Any] = {"ch_axis": -1}
CHANNELS: dict[str, Any] = {"ch_axis": 0, "symmetric": True, "is_dynamic": True}
BLOCKS: dict[str, Any] = {"ch_axis": -1, "block_size": 16}

# Operation -> helper class and its arguments, the same in this package and in amd-quark.
HELPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8 per channel": ("Int8PerChannelSpec", CHANNELS),
    "int8 per group 128": ("Int8PerGroupSpec", {**GROUPS, "group_size": 128, "is_dynamic": True}),
    "fp8 per tensor": ("FP8E4M3PerTensorSpec", {"is_dynamic": True}),
    "fp8 per channel": ("FP8E4M3PerChannelSpec", CHANNELS),
    "fp4 per group 32": ("FP4PerGroupSpec", {**GROUPS, "group_size": 32}),
    "MXFP4": ("OCP_MXFP4Spec", GROUPS),
    "MXFP6 e3m2": ("OCP_MXFP6E3M2Spec", GROUPS),
    "MXFP6 e2m3": ("OCP_MXFP6E2M3Spec", GROUPS),
    "MXFP8 e4m3": ("OCP_MXFP8E4M3Spec", GROUPS),
    "MX6": ("MX6Spec", BLOCKS),
    "MX9": ("MX9Spec", BLOCKS),
    "BFP16": ("BFP16Spec", GROUPS),
}
OBSERVERS = {
    "observe percentile": "PerTensorPercentileObserver",
    "observe least squares": "PerTensorMSEObserver",
}

Operations = dict[str, Callable[[], object]]


def quark(x: torch.Tensor) -> Operations:
    """Return the operations of this package, and copies of the tensor to compare them with."""
    import quark.torch.quantization as api
    from quark.torch.quantization.nn.quantizer import TensorQuantizer
    from quark.torch.quantization.observer.registry import observer_class

    mapped = x.clone()
    found: Operations = {
        COPY: lambda: mapped.copy_(x),
        FRESH_COPY: lambda: _fresh(x).copy_(x),
    }
    for name, (helper, arguments) in HELPERS.items():
        quantizer = TensorQuantizer(getattr(api, helper)(**arguments).to_quantization_spec())
        found[name] = _call(quantizer, x)
    spec = api.Int8PerTensorSpec(is_dynamic=False).to_quantization_spec()
    for name, observer in OBSERVERS.items():
        found[name] = _observation(observer_class(observer), spec, x, "calculate_qparams")
    return found


def amd_quark(x: torch.Tensor) -> Operations:
    """Return the operations of amd-quark, which imports under the same name as this package."""
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    import quark.torch.quantization as api
    import quark.torch.quantization.observer.observer as observers

    found: Operations = {}
    for name, (helper, arguments) in HELPERS.items():
        spec = getattr(api, helper)(**arguments).to_quantization_spec()
        found[name] = _call(FakeQuantizeBase.get_fake_quantize(spec), x)
    spec = api.Int8PerTensorSpec(
        observer_method="min_max", symmetric=True, scale_type="float", is_dynamic=False
    ).to_quantization_spec()
    for name, observer in OBSERVERS.items():
        found[name] = _observation(getattr(observers, observer), spec, x, "_calculate_qparams")
    return found


def torchao(x: torch.Tensor) -> Operations:
    """Return the operations of torchao, whose MX tensors are packed codes in between."""
    import torchao.quantization.quant_primitives as ao
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.quantization.granularity import PerTensor
    from torchao.quantization.observer import AffineQuantizedMSEObserver

    symmetric, whole = ao.MappingType.SYMMETRIC, tuple(x.shape)

    def integer(*block: int) -> torch.Tensor:
        qparams = ao.choose_qparams_affine(x, symmetric, block, torch.int8)
        return ao._fake_quantize_affine(x, block, *qparams, torch.int8)

    def float8(*block: int) -> torch.Tensor:
        scale = ao._choose_scale_float8(x, list(block))
        return ao._dequantize_affine_float8(ao._quantize_affine_float8(x, scale), scale)

    def microscaling(element: Any) -> torch.Tensor:
        return MXTensor.to_mx(x, element, 32).dequantize(torch.float32)

    def least_squares() -> object:
        observer = AffineQuantizedMSEObserver(
            symmetric, torch.int8, PerTensor(), eps=2.0**-23, zero_point_dtype=torch.int32
        )
        observer(x)
        return observer.calculate_qparams()

    return {
        "int8 per channel": lambda: integer(1, whole[1]),
        "int8 per group 128": lambda: integer(1, 128),
        "fp8 per tensor": lambda: float8(*whole),
        "fp8 per channel": lambda: float8(1, whole[1]),
        "MXFP4": lambda: microscaling(torch.float4_e2m1fn_x2),
        "MXFP6 e3m2": lambda: microscaling(DTYPE_FP6_E3M2),
        "MXFP6 e2m3": lambda: microscaling(DTYPE_FP6_E2M3),
        "MXFP8 e4m3": lambda: microscaling(torch.float8_e4m3fn),
        "observe least squares": least_squares,
    }


SOFTWARE = {"quark": quark, "amd-quark": amd_quark, "torchao": torchao}


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``x`` in memory that has no pages yet: what ``clone`` begins with."""
    memory = mmap.mmap(-1, x.numel() * x.element_size(), access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def _call(module: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    return lambda: module(x)


def _observation(
    observer: Callable[[Any], Any], spec: Any, x: torch.Tensor, answer: str
) -> Callable[[], object]:
    def observe() -> object:
        fresh = observer(spec)
        fresh(x)
        return getattr(fresh, answer)()

    return observe


def measure(software: str, edge: int, rounds: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each operation, after one to warm up or compile."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = SOFTWARE[software](torch.randn(edge, edge))
    first = {name: _seconds(run) for name, run in work.items()}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            if first[name] < SLOW:
                seconds[name].append(_seconds(run))
    return {name: 1000 * median(values or [first[name]]) for name, values in seconds.items()}


def _seconds(run: Callable[[], object]) -> float:
    start = cpu_seconds()
    run()
    return cpu_seconds() - start


if __name__ == "__main__":
    with torch.no_grad():
        result = measure(*map(json.loads, sys.argv[1:]))
    print("\n" + json.dumps(result))
