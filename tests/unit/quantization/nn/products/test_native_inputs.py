"""Inputs that a kernel of numba quantizes: the bits of the plain path, or None."""

import logging
from dataclasses import replace

import pytest
import torch

from quark.torch import set_runtime
from quark.torch.export.recognition import load_checkpoint
from quark.torch.numerics import qdq
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.granularity import QSchemeType
from quark.torch.numerics.native import compilation
from quark.torch.numerics.scale_formats import E8M0, POF2
from quark.torch.numerics.scheme import Scheme
from quark.torch.quantization.nn.products import native_inputs
from tests.configurations import preset
from tests.unit.quantization.nn.products.test_compiled_inputs import MX, SCHEMES, TENSOR, TOKEN
from tests.unit.quantization.nn.products.test_compiled_inputs import plain as plain_path

pytest.importorskip("numba")
SIGNED = Scheme(Dtype.int2.value, QSchemeType.per_group, -1, 32, signed_scales=True)
DYNAMIC = {name: s for name, s in SCHEMES.items() if s.symmetric or s.fmt.is_float}
DYNAMIC |= {
    "fp8 e5m2 per token": replace(TOKEN, fmt=Dtype.fp8_e5m2.value),
    "int4 per group": Scheme(Dtype.int4.value, QSchemeType.per_group, -1, 32),
    "int4, signed scales": replace(SIGNED, fmt=Dtype.int4.value),
    "int3, signed scales": replace(SIGNED, fmt=Dtype.int3.value),
    "int4, signed scales per token": replace(TOKEN, fmt=Dtype.int4.value, signed_scales=True),
    "mx6": Scheme(Dtype.mx6.value, QSchemeType.per_group, -1, 16),
    "mx9": Scheme(Dtype.mx9.value, QSchemeType.per_group, -1, 16),
    "bfp16": Scheme(Dtype.bfp16.value, QSchemeType.per_group, -1, 8),
    "int16 per tensor": Scheme(Dtype.int16.value),
    "mxint8": Scheme(Dtype.int8.value, QSchemeType.per_group, -1, 32, scale=E8M0),
    "mxfp4, floor": replace(MX, scale_mode="floor"),
    "mxfp4, ceil": replace(MX, scale_mode="ceil"),
    "fp8 under powers of two": replace(TOKEN, fmt=Dtype.fp8_e4m3.value, scale=POF2),
    "int8 under powers of two": replace(TOKEN, scale=POF2),
}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Return the plain path, without kernels."""
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1 << 40)
    native_inputs._is_right.cache_clear()
    return plain_path


def every_size(dtype):
    """Rows of all magnitudes, zeros of both signs, ties, infinity, NaN."""
    x = torch.randn(32, 96, generator=torch.Generator().manual_seed(1)) * torch.exp2(
        torch.linspace(-145, 126, 32)
    ).view(-1, 1)
    x[3], x[4], x[5] = 0.0, -0.0, torch.arange(-48, 48) / 8
    x[6, 5], x[7, 40], x[8] = float("inf"), float("nan"), torch.arange(-48, 48) * 2.0**-149
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_schemes_have_the_bits_of_the_plain_path(name, dtype, plain, monkeypatch):
    scheme = DYNAMIC[name]
    tensor_scale = torch.tensor(0.01) if scheme.scale.two_level else None
    ordinary = torch.randn(2, 3, 96).to(dtype)
    strided = torch.randn(96, 5).to(dtype).T
    for x in (every_size(dtype), ordinary, ordinary[:1, :1], strided):
        before = x.clone()
        y = native_inputs.fake_quantize(x, None, None, scheme, tensor_scale)
        assert y is not None
        assert y.shape == x.shape
        assert native_inputs.equal_bits(y, plain(x, scheme, tensor_scale))
        assert native_inputs.equal_bits(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scheme", "zero"),
    [
        (TENSOR, None),
        (replace(TENSOR, fmt=Dtype.int8.value), None),
        (replace(TENSOR, fmt=Dtype.uint8.value, symmetric=False), 117),
        (replace(TENSOR, fmt=Dtype.uint4.value, symmetric=False, float_zero_point=True), 7.3),
    ],
)
def test_static_scales(scheme, zero, dtype):
    zero = None if zero is None else torch.tensor([zero])
    for x in (torch.randn(2, 3, 112).to(dtype), every_size(dtype)):
        scale = torch.tensor([0.03])
        y = native_inputs.fake_quantize(x, scale, zero, scheme)
        assert y is not None
        assert native_inputs.equal_bits(y, qdq.fake_quantize(x, scale, zero, scheme))


def test_threads_share_the_rows(monkeypatch, plain):
    monkeypatch.setattr(compilation, "_PIECE", 1)
    x, threads = torch.randn(700, 64), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(native_inputs.fake_quantize(x, None, None, MX), plain(x, MX))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("scheme", "x"),
    [
        (MX, torch.randn(2, 64).half()),
        (MX, torch.randn(2, 40)),  # a group of padding
        (TOKEN, torch.randn(2, 40)),  # half a vector
        (replace(TOKEN, fmt=Dtype.uint8.value, symmetric=False), torch.randn(2, 64)),
        (replace(TOKEN, rounding=RoundType.floor), torch.randn(2, 64)),
        (Scheme(Dtype.mx9.value, QSchemeType.per_group, -1, 16), torch.randn(2, 40)),
        (Scheme(Dtype.mx9.value, QSchemeType.per_group, 0, 16), torch.randn(64, 64)),
        (Scheme(Dtype.bfp16.value, QSchemeType.per_group, -1, 8), torch.randn(2, 68)),
        (Scheme(Dtype.bfp16.value, QSchemeType.per_group, 0, 8), torch.randn(64, 64)),
        (Scheme(Dtype.int8.value, QSchemeType.per_channel, 1), torch.randn(2, 64)),
        (SCHEMES["nvfp4"], torch.randn(2, 64)),  # without a tensor scale
        (MX, torch.randn(2, 64, requires_grad=True)),
    ],
)
def test_other_inputs_keep_the_plain_path(scheme, x):
    assert native_inputs.fake_quantize(x, None, None, scheme) is None


def test_the_switch(monkeypatch):
    monkeypatch.setenv(compilation.SWITCH, "torch")
    assert native_inputs.fake_quantize(torch.randn(2, 64), None, None, MX) is None


def test_small_inputs_do_not_import_numba(monkeypatch):
    monkeypatch.delitem(native_inputs.sys.modules, "numba")
    assert native_inputs.fake_quantize(torch.randn(2, 64), None, None, MX) is None


@pytest.mark.parametrize("fails", [False, True])
def test_wrong_values_are_refused_and_logged(fails, monkeypatch, caplog):
    run = native_inputs.run_rows

    def wrong(function, tensors, *constants):
        if fails:
            raise RuntimeError("no such instruction\nmore")
        run(function, tensors, *constants)
        tensors[1][0, 0] += 1

    monkeypatch.setattr(native_inputs, "run_rows", wrong)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert native_inputs.fake_quantize(torch.randn(2, 64), None, None, MX) is None
    (record,) = caplog.records
    assert ("no such instruction." if fails else "differ from those") in record.message
    native_inputs._is_right.cache_clear()


@pytest.mark.parametrize("runtime", ["exact", "fast"])
def test_layers_quantize_inputs_by_the_kernel(runtime, build, quantize, export, monkeypatch):
    model = load_checkpoint(export(quantize(build(num_hidden_layers=1), preset("mxfp4")))).eval()
    set_runtime(model, runtime)
    mlp, x, calls = model.model.layers[0].mlp, torch.randn(3, 64), []
    monkeypatch.setenv(compilation.SWITCH, "torch")
    expected = mlp(x)
    monkeypatch.delenv(compilation.SWITCH)
    run = native_inputs.run_rows
    monkeypatch.setattr(
        native_inputs, "run_rows", lambda *args: (calls.append(args[0]), run(*args))
    )
    assert torch.equal(mlp(x), expected)
    assert calls.count(native_inputs.fake_quantize_rows) >= 3  # gate, up, down
    with torch.enable_grad():
        before = len(calls)
        mlp(x.requires_grad_())
    assert len(calls) == before
