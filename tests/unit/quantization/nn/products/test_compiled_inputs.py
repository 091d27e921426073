"""Compiled quantization of inputs: the bits of the plain path, or None."""

import logging
from dataclasses import replace

import pytest
import torch

from quark.torch.numerics import qdq
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.scale_formats import E4M3, E8M0
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import compiled, compiled_inputs
from tests.unit.quantization.nn.products.test_compiled import has_compiler

TENSOR = Scheme(Dtype.fp8_e4m3.value)
TOKEN = Scheme(Dtype.int8.value, QSchemeType.per_channel, 1, per_token=True)
MX = Scheme(Dtype.fp4.value, QSchemeType.per_group, -1, 32, scale=E8M0)
SCHEMES = {
    "fp8 per tensor": TENSOR,
    "int8 per token": TOKEN,
    "uint8 per token": replace(TOKEN, fmt=Dtype.uint8.value, symmetric=False),
    "fp8 per token": replace(TOKEN, fmt=Dtype.fp8_e4m3.value),
    "mxfp4": MX,
    "mxfp6": replace(MX, fmt=Dtype.fp6_e2m3.value),
    "nvfp4": replace(MX, group=16, scale=E4M3),
}


@pytest.fixture(autouse=True)
def no_answers_of_other_tests():
    compiled_inputs._function.cache_clear()
    yield
    compiled_inputs._function.cache_clear()


@pytest.fixture
def not_compiled(monkeypatch):
    """The functions as Python runs them."""
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)


def plain(x, scheme, tensor_scale=None):
    return qdq.fake_quantize(x, *qdq.dynamic_qparams(x, scheme, tensor_scale), scheme)


def check(x, scheme):
    tensor_scale = torch.tensor(0.01) if scheme.scale.two_level else None
    before = x.clone()
    y = compiled_inputs.fake_quantize(x, None, None, scheme, tensor_scale)
    assert y is not None
    assert torch.equal(y, plain(x, scheme, tensor_scale))
    assert y.dtype == x.dtype
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_dynamic_schemes(name, dtype, not_compiled):
    for shape in ((1, 64), (2, 3, 64), (1, 1, 96)):
        check(torch.randn(shape).to(dtype), SCHEMES[name])
    check(torch.randn(64, 4).to(dtype).T.contiguous().T[:, :2].repeat(1, 32), SCHEMES[name])


@pytest.mark.parametrize("scheme", [TENSOR, replace(TENSOR, fmt=Dtype.uint8.value)])
def test_static_scales(scheme, not_compiled):
    x, scale = torch.randn(2, 3, 64), torch.tensor([0.03])
    zero = None if scheme.fmt.is_float else torch.tensor([117])
    y = compiled_inputs.fake_quantize(x, scale, zero, scheme)
    assert torch.equal(y, qdq.fake_quantize(x, scale, zero, scheme))


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (MX, (2, 40)),  # a group of padding
        (Scheme(Dtype.mx9.value, QSchemeType.per_group, -1, 16), (2, 64)),
        (Scheme(Dtype.int8.value, QSchemeType.per_channel, 1), (2, 64)),  # blocks are columns
        (Scheme(Dtype.bfloat16.value), (2, 64)),
        (TENSOR, (0, 64)),
    ],
)
def test_what_is_left_to_the_plain_path(scheme, shape, not_compiled):
    assert compiled_inputs.fake_quantize(torch.randn(shape), None, None, scheme) is None


def test_a_wrong_function_is_refused_and_logged_once(monkeypatch, caplog):
    def wrong(function):  # as a product that is contracted with a sum
        return lambda x, *numbers: torch.nextafter(function(x, *numbers), torch.tensor(9.0))

    monkeypatch.setattr(compiled, "compile_function", wrong)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert compiled_inputs.fake_quantize(torch.randn(2, 64), None, None, MX) is None
    (record,) = caplog.records
    assert "differ from those of the plain path" in record.message


@has_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SCHEMES)
def test_one_compilation_serves_all_shapes(name, dtype):
    shapes = [(5, 7, 96), (3, 1, 4096)] + [(1, 64), (1, 1, 4096)] * (name != "fp8 per tensor")
    check(torch.randn(2, 64).to(dtype), SCHEMES[name])
    check(torch.randn(1, 64).to(dtype), SCHEMES[name])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in shapes:
            check(torch.randn(shape).to(dtype) * 3, SCHEMES[name])
            with torch.inference_mode():
                check(torch.randn(shape).to(dtype) * 3, SCHEMES[name])
