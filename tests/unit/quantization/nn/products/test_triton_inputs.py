"""Inputs that Triton quantizes: the bits of the plain path, or None."""

import logging
from dataclasses import replace

import pytest
import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.scale_formats import E5M3, POF2
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn import runtime_layer
from quark.torch.quantization.nn.products import product, triton_functions, triton_inputs
from tests.unit.quantization.nn.products.test_compiled_inputs import (
    MX,
    SCHEMES,
    TENSOR,
    TOKEN,
    plain,
)
from tests.unit.quantization.nn.products.test_triton_method import DEVICE, layers

runs_triton = pytest.mark.triton
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of infinity and NaN
FP8 = SCHEMES["fp8 per token"]
CASES = {
    **SCHEMES,
    "int4 per token": replace(TOKEN, fmt=Dtype.int4.value, symmetric=False),
    "int8, fractions": replace(TOKEN, symmetric=False, float_zero_point=True),
    "int8, away from zero": replace(TOKEN, rounding=RoundType.round),
    "int4 in groups, down": replace(MX, fmt=Dtype.int4.value, rounding=RoundType.floor, scale=POF2),
    "mxint8": replace(MX, fmt=Dtype.mx.value),
    "mxfp8, floor": replace(MX, fmt=Dtype.fp8_e5m2.value, scale_mode="floor"),
    "mxfp4, ceil": replace(MX, scale_mode="ceil"),
    "fp8, powers": replace(FP8, scale=POF2),
    "fp4, e5m3": replace(MX, scale=E5M3),
}


@pytest.fixture(autouse=True)
def no_answers_of_other_tests():
    triton_functions.log_once.cache_clear()
    triton_inputs._is_right.cache_clear()
    yield
    triton_inputs._is_right.cache_clear()


HALF = pytest.param(torch.float16, marks=pytest.mark.nightly)


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, HALF])
@pytest.mark.parametrize("name", CASES)
def test_dynamic_schemes(name, dtype):
    case = CASES[name]
    tensor_scale = torch.tensor(0.01, device=DEVICE) if case.scale.two_level else None
    for shape in ((1, 64), (2, 3, 1056)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        before = x.clone()
        y = triton_inputs.fake_quantize(x, None, None, case, tensor_scale)
        assert y is not None
        assert torch.equal(y, plain(x, case, tensor_scale))
        assert y.dtype == dtype
        assert torch.equal(x, before)


@runs_triton
def test_any_tensor_scale():
    x = torch.randn(3, 64, device=DEVICE)
    for number in (9e-36, 1e-39, 1e37, 0.0, -9e-36):
        tensor_scale = torch.tensor(number, device=DEVICE)
        y = triton_inputs.fake_quantize(x, None, None, SCHEMES["nvfp4"], tensor_scale)
        assert torch.equal(y, plain(x, SCHEMES["nvfp4"], tensor_scale))


@runs_triton
@pytest.mark.parametrize(
    "case",
    [
        TENSOR,
        replace(TENSOR, fmt=Dtype.int8.value),
        replace(TENSOR, fmt=Dtype.uint8.value, symmetric=False),
        replace(TENSOR, fmt=Dtype.uint8.value, symmetric=False, float_zero_point=True),
    ],
    ids=["fp8", "int8", "uint8", "fractional"],
)
def test_static_scales(case):
    x, scale = torch.randn(2, 3, 900, device=DEVICE), torch.tensor([0.03], device=DEVICE)
    point = 117.3 if case.float_zero_point else 0 if case.symmetric else 117
    zero = None if case.fmt.is_float else torch.tensor([point], device=DEVICE)
    y = triton_inputs.fake_quantize(x, scale, zero, case)
    assert torch.equal(y, qdq.fake_quantize(x, scale, zero, case))


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (replace(TOKEN, fmt=Dtype.uint8.value), (2, 64)),  # the code of zero is in the middle
        (replace(SCHEMES["uint8 per token"], scale=POF2), (2, 64)),
        (MX, (2, 40)),  # a group of padding
        (SCHEMES["nvfp4"], (2, 64)),  # its tensor scale is not known
        (TENSOR, (1, 1 << 17)),  # too long for a program
    ],
)
def test_what_is_left_to_the_plain_path(case, shape):
    assert triton_inputs.fake_quantize(torch.randn(shape, device=DEVICE), None, None, case) is None


@runs_triton
def test_a_wrong_kernel_is_refused_and_logged_once(monkeypatch, caplog):
    launch = triton_inputs._launch
    monkeypatch.setattr(
        triton_inputs, "_launch", lambda *args: (launch(*args)[0] * 1.0000001, None)
    )
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            x = torch.randn(2, 64, device=DEVICE)
            assert triton_inputs.fake_quantize(x, None, None, TOKEN) is None
    (record,) = caplog.records
    assert "differ from those of the plain path" in record.message


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [FP8, TENSOR], ids=["tokens", "tensor"])
def test_codes(case, dtype):
    x = torch.randn(3, 1056, device=DEVICE).to(dtype)
    given = None if case is FP8 else torch.tensor(0.02, device=DEVICE)
    codes, scale = triton_inputs.quantize(x, given, case)
    expected = qdq.dynamic_qparams(x, case)[0] if given is None else given
    assert torch.equal(scale.flatten(), expected.flatten())
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.float(), qdq.quantize(x, expected, None, case).float())


@runs_triton
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8"])
def test_layers(name, monkeypatch):
    monkeypatch.setitem(product.METHODS, "cpu", product.METHODS["cuda"])
    monkeypatch.setitem(runtime_layer.ONE_PASS, "cpu", runtime_layer.ONE_PASS["cuda"])
    layer, _ = layers(scheme(name).weight, scheme(name).input_tensors)
    x = torch.randn(2, 3, 64, device=DEVICE)
    expected = layer.quantized_input(x)
    calls, launch = [], triton_inputs._launch
    monkeypatch.setattr(triton_inputs, "_launch", lambda *a: calls.append(a) or launch(*a))
    assert torch.equal(layer.quantized_input(x), expected)
    assert not calls
    layer.set_runtime("auto")
    assert torch.equal(layer.quantized_input(x), expected)
    assert calls
    assert layer.quantized_input(x.requires_grad_()).requires_grad
