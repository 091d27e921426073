"""Products of fp8 codes, on a GPU, or on a CPU, for which torch has this kernel too."""

import logging

import pytest
import torch
from torch import nn

from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.nn.products import product, scaled_method, triton_functions
from tests.configurations import config
from tests.unit.quantization.nn.products.test_triton_method import DEVICE
from tests.unit.quantization.nn.products.test_triton_method import layers as on_device
from tests.unit.quantization.nn.test_runtime import Counter, difference, packed

STATIC, TOKENS = scheme("fp8"), scheme("ptpc_fp8")
CASES = {
    "tensor and tensor": (STATIC.weight, STATIC.input_tensors),
    "row and token": (TOKENS.weight, TOKENS.input_tensors),
    "tensor and token": (STATIC.weight, TOKENS.input_tensors),
    "row and tensor": (TOKENS.weight, STATIC.input_tensors),
}
HALVED = torch.float8_e4m3fnuz


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Take what GPUs take, with nothing remembered."""
    monkeypatch.setitem(product.METHODS, "cpu", product.METHODS["cuda"])
    monkeypatch.setattr(triton_functions, "find_spec", lambda name: None)
    scaled_method.is_proved.cache_clear()
    triton_functions.load_functions.cache_clear()
    yield
    triton_functions.load_functions.cache_clear()
    scaled_method.is_proved.cache_clear()


@pytest.fixture
def has_kernel():
    kinds = torch.device(DEVICE), torch.float8_e4m3fn, torch.bfloat16, True
    if not scaled_method.is_proved(*kinds):
        pytest.skip("this version of torch does not multiply fp8 on this device")


def layers(case, dtype=torch.bfloat16, shape=(64, 48)):
    return on_device(*case, *shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_layers(name, dtype, has_kernel):
    layer, frozen = layers(CASES[name], dtype)
    expected, codes = layer.value("weight"), layer._stored("weight").clone()
    layer.set_runtime("auto")
    assert layer.product_name == "fp8"
    assert torch.equal(layer.value("weight"), expected)
    assert torch.equal(layer._stored("weight").view(torch.uint8), codes.view(torch.uint8))
    for rows in (1, 3, 17, 128):
        x = torch.randn(2, rows, 64, device=DEVICE).to(dtype)
        y = layer(x)
        assert (y.dtype, y.shape) == (dtype, (2, rows, 48))
        assert difference(y.float(), frozen(x).float()) < 2e-2
    assert layer(x[:, :0]).shape == (2, 0, 48)
    assert layer(x.float()).dtype == torch.float32
    layer.set_runtime("exact")
    assert torch.equal(layer(x), frozen(x))


@pytest.mark.parametrize("name", CASES)
def test_codes_are_multiplied_before_scales(name, has_kernel):
    """Against float64 products of values that are not rounded to bfloat16."""
    layer, _ = layers(CASES[name])
    x, weight = torch.randn(7, 64, device=DEVICE).bfloat16(), layer.value("weight", torch.float32)
    inputs = layer.quantized_input(x.float())
    layer.set_runtime("auto")
    y = layer.packed_product.multiply(x).double()
    exact = inputs.double() @ weight.double().T
    assert difference(y, exact) < 2.0**-8  # the result in bfloat16


@pytest.mark.parametrize(
    ("weight", "inputs", "dtype", "shape"),
    [
        (STATIC.weight, STATIC.input_tensors, torch.float32, (64, 48)),
        (STATIC.weight, None, torch.bfloat16, (64, 48)),
        (STATIC.weight, scheme("mxfp8").input_tensors, torch.bfloat16, (64, 48)),
        (scheme("mxfp8").weight, STATIC.input_tensors, torch.bfloat16, (64, 48)),
        (STATIC.weight, STATIC.input_tensors, torch.bfloat16, (72, 48)),
        (STATIC.weight, STATIC.input_tensors, torch.bfloat16, (64, 40)),
    ],
    ids=["float32", "float inputs", "MX inputs", "MX weight", "inputs", "outputs"],
)
def test_what_the_kernel_does_not_take(weight, inputs, dtype, shape):
    layer, _ = layers((weight, inputs), dtype, shape)
    layer.set_runtime("auto")
    assert layer.product_name != "fp8"


def missing(*args, **kwargs):
    raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute 8.9")


def wrong(*args, **kwargs):
    return scaled(*args, **kwargs) * 1.05


def scaled(x, weight, a, b, out_dtype):
    return ((x.float() @ weight.float()) * a * b).to(out_dtype)


@pytest.mark.parametrize(
    ("kernel", "reason"), [(missing, "compute 8.9"), (wrong, "sample is 0.049")]
)
def test_a_device_that_multiplies_wrong_is_refused(kernel, reason, monkeypatch, caplog):
    monkeypatch.setattr(torch, "_scaled_mm", kernel)
    with caplog.at_level(logging.INFO, scaled_method.__name__):
        for _ in range(2):
            layer, _ = layers(CASES["row and token"])
            layer.set_runtime("auto")
            assert layer.product_name != "fp8"
    (record,) = [r for r in caplog.records if r.name == scaled_method.__name__]
    assert reason in record.message


def test_codes_without_negative_zero(monkeypatch):
    """As on GPUs whose codes stand for half of the values: the kernel is that of this file."""
    types = []
    monkeypatch.setattr(scaled_method, "device_type", lambda device: HALVED)
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda x, *a, **k: types.append(x.dtype) or scaled(x, *a, **k)
    )
    linear = nn.Linear(64, 48).bfloat16()
    linear.weight.data[:, ::3] = -1e-9  # rounds to negative zeros
    x = torch.randn(5, 64).bfloat16()
    layer, frozen = packed(linear, config(*CASES["row and token"], exclude=()), x)
    expected, codes = layer.value("weight"), layer._stored("weight").clone()
    assert (codes.view(torch.uint8) == 0x80).sum() >= 48 * 22
    layer.set_runtime("auto")
    assert layer.product_name == "fp8"
    assert layer.packed_product.parts["codes"].dtype == HALVED
    assert torch.equal(layer.value("weight"), expected)
    assert torch.equal(layer._stored("weight").view(torch.uint8), codes.view(torch.uint8))
    assert difference(layer(x).float(), frozen(x).float()) < 2e-2
    assert set(types) == {HALVED}


def test_halved_codes_have_all_values():
    codes = torch.arange(256).byte().view(torch.float8_e4m3fn)
    halved = scaled_method.to_device_codes(codes, HALVED)
    torch.testing.assert_close(halved.float() * 2, codes.float(), rtol=0, atol=0, equal_nan=True)


def test_a_compiled_layer(has_kernel):
    layer, _ = layers(CASES["row and token"])
    layer.set_runtime("auto")
    torch._dynamo.reset()
    counter, x = Counter(), torch.randn(5, 64, device=DEVICE).bfloat16()
    whole = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        assert torch.equal(whole(x), layer(x))
    assert len(counter.graphs) == 1
