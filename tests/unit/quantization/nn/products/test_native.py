"""Kernels of numba for packed weights: bits of every format, sums, types, and refusals."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.native import compilation
from quark.torch.numerics.native.vectors import FEATURE, WIDE
from quark.torch.numerics.qdq import dequantize
from quark.torch.quantization.nn.products import fast_type, native, native_constants
from quark.torch.quantization.nn.products.arrangement import Arrangement
from quark.torch.quantization.nn.products.kernels import KERNELS
from quark.torch.quantization.nn.products.panels import Panels
from quark.torch.quantization.nn.products.product import PanelMethod
from tests.unit.quantization.nn.products.test_panels import FORMATS, weight
from tests.unit.quantization.nn.products.test_panels import WIDE as WIDE_FORMAT

pytest.importorskip("numba")
TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


KERNELS_OF_NUMBA = {"words": {FEATURE}, "vectors": {FEATURE, WIDE}, "general": set()}


@pytest.fixture(autouse=True, params=KERNELS_OF_NUMBA)
def any_size(request, monkeypatch):
    """Small weights take kernels too: words, vectors where the machine has them, and the others."""
    features = KERNELS_OF_NUMBA[request.param]
    if features and not compilation.has_feature(FEATURE):
        pytest.skip("numba has no vector instructions for this machine")
    for module in (native, native_constants):
        monkeypatch.setattr(module, "has_feature", lambda name: name in features)
    monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    native._log_refusal.cache_clear()


def regrouped(state, group):
    """The same codes with another number of scales."""
    state.spec.scheme.__dict__["group"] = group
    return state._replace(scale=torch.rand(70, 64 // group) + 0.1)


def decoded(panels, parts, dtype):
    chunks = [v.flatten(0, 1).clone() for _, v in native.decode(panels, parts, dtype)]
    return torch.cat(chunks)[: panels.arrangement.outputs]


def equal_bits(y, expected):
    words = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[y.dtype]
    return torch.equal(y.view(words), expected.view(words))


@pytest.mark.parametrize("group", [8, 16, 32, 64])
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
@pytest.mark.sampled(24)
def test_every_format_and_group_size_has_the_bits_of_dequantize(dtype, group):
    state = regrouped(weight(dtype, True), group)
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, group))
    if not native.serves(panels, parts):
        assert dtype is WIDE_FORMAT  # codes of more than a byte need vectors
        assert not native_constants.has_vectors(panels)
        return
    expected = dequantize(state.codes, state.scale, None, state.scheme)
    for to in TYPES:
        assert equal_bits(decoded(panels, parts, to), expected.to(to))
    check_products(panels, parts, expected)


def check_products(panels, parts, values):
    """The bound of docs, for inputs whose mean is not zero and one of which is large.

    Sums of unsigned codes would cancel there.
    """
    x = 1 + torch.randn(35, values.shape[1]) / 8
    x[:, 5] = 1000.0
    exact = x.double() @ values.double().T
    for rows in (1, 3, 9, 35):
        y = native.NativeProduct(panels, parts).multiply(x[:rows])[:, : len(values)]
        assert (y - exact[:rows]).abs().max() < 1e-5 * exact[:rows].abs().max()


@pytest.mark.parametrize("group", [32, 128, 160, 640])
@pytest.mark.parametrize("dtype", [Dtype.int8, Dtype.uint4, Dtype.fp4], ids=lambda d: d.name)
def test_runs_of_one_to_four_words(dtype, group):
    codes = torch.arange(70 * 640).remainder(1 << dtype.value.bits).view(70, 640).byte()
    codes = codes.view(torch.int8) if dtype.value.code_dtype == torch.int8 else codes
    scale = torch.rand(70, 640 // group) + 0.1
    state = weight(dtype, dtype.value.signed)._replace(codes=codes, scale=scale)
    state.spec.scheme.__dict__["group"] = group
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 640, group))
    check_products(panels, parts, dequantize(codes, scale, None, state.scheme))


@pytest.mark.parametrize("group", [12, 20, 30])
def test_group_sizes_that_are_no_power_of_two(group):
    codes = torch.arange(70 * 60).remainder(16).view(70, 60).byte()
    state = weight(Dtype.uint4, False)._replace(codes=codes, scale=torch.rand(70, 60 // group))
    state.spec.scheme.__dict__["group"] = group
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 60, group))
    expected = dequantize(codes, state.scale, None, state.scheme)
    assert equal_bits(decoded(panels, parts, torch.float32), expected)


@pytest.mark.parametrize("zeros", ["one", "many", "fractions"])
@pytest.mark.parametrize("group", [8, 16, 32])
@pytest.mark.parametrize(
    "dtype", [d for d in FORMATS if not d.value.is_float], ids=lambda d: d.name
)
@pytest.mark.sampled(24)
def test_zero_points(dtype, zeros, group):
    fmt, shape = dtype.value, (70, 64 // group)
    points = {
        "one": torch.full(shape, 1),
        "many": torch.randint(fmt.qmin, fmt.qmax + 1, shape),
        "fractions": torch.randint(0, 8, shape) / 4,  # sums with the offset are exact
    }[zeros]
    state = regrouped(weight(dtype, False, points), group)
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, group))
    if not native.serves(panels, parts):
        assert dtype is WIDE_FORMAT
        return
    expected = dequantize(state.codes, state.scale, points, state.scheme)
    for to in TYPES:
        assert equal_bits(decoded(panels, parts, to), expected.to(to))
    check_products(panels, parts, expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.sampled(3)
def test_scales_in_every_type_and_two_level_scales(stored):
    state = weight(Dtype.fp4, True)
    fractions = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-10, torch.float32: 2.0**-20}
    ratio = 1 + torch.randint(0, 60, (70, 2)) * fractions[stored]
    for tensor_scale in (None, torch.tensor(0.0123)):
        scale = ratio if tensor_scale is None else ratio * tensor_scale
        panels, parts = Panels.pack(
            state._replace(scale=scale, scale_2=tensor_scale), Arrangement.of_rows(70, 64, 32)
        )
        if tensor_scale is None:
            assert parts["scale"].dtype == stored
        expected = dequantize(state.codes, scale, None, state.scheme)
        assert equal_bits(decoded(panels, parts, torch.float32), expected)


def test_values_are_rounded_to_bfloat16_as_by_torch():
    """Ties, the largest values and zeros of both signs, as products of codes and scales."""
    codes = torch.arange(-128, 128).view(4, 64).to(torch.int8).repeat(18, 1)[:70]
    scale = torch.cat([1 + torch.arange(139) / 128, torch.tensor([3e38])])[:140].view(70, 2)
    state = weight(Dtype.int8, True)._replace(codes=codes, scale=scale)
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, 32))
    expected = dequantize(codes, scale, None, state.scheme)
    assert ((expected.view(torch.int32) & 0xFFFF) == 0x8000).sum() > 100  # ties
    assert expected.isinf().any()
    assert equal_bits(decoded(panels, parts, torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("group", [8, 16, 24, 48, 112])
def test_rows_of_an_odd_number_of_vectors(group):
    """Rows of 7 and 21 vectors: sums of several vectors at a time have a rest."""
    inputs = {24: 336, 48: 336}.get(group, 112)
    codes = torch.arange(70 * inputs).remainder(16).view(70, inputs).byte()
    scale = torch.rand(70, inputs // group) + 0.1
    state = weight(Dtype.uint4, False)._replace(codes=codes, scale=scale)
    state.spec.scheme.__dict__["group"] = group
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, inputs, group))
    expected = dequantize(codes, scale, None, state.scheme)
    assert equal_bits(decoded(panels, parts, torch.float32), expected)
    for rows in (1, 3):
        x = torch.randn(rows, inputs)
        exact = x.double() @ expected.double().T
        y = native.NativeProduct(panels, parts).multiply(x)[:, :70]
        assert (y - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("name", ["int4", "int3", "fp8_e4m3", "fp4"])
def test_products_of_few_and_many_rows(rows, name, monkeypatch):
    monkeypatch.setitem(native._CHUNKS, torch.float32, 2 * 32 * 64)
    state = weight(Dtype[name], True)
    method = PanelMethod(*Panels.pack(state, Arrangement(70, 64, 32, 32))[:1], None, True, "native")
    _, parts = Panels.pack(state, Arrangement(70, 64, 32, 32))
    x = torch.randn(rows, 64)
    exact = x.double() @ dequantize(state.codes, state.scale, None, state.scheme).double().T
    y = method.multiply(parts, x)
    assert y.shape == (rows, 70)
    assert (y - exact).abs().max() < 1e-6 * exact.abs().max()
    assert method.multiply(parts, x[:0]).shape == (0, 70)


@given(
    outputs=st.integers(1, 300),
    inputs=st.integers(1, 70).map(lambda vectors: 16 * vectors),
    tokens=st.integers(1, 40) | st.sampled_from([512, 513, 1030]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    threads=st.integers(1, 3),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_strips_of_any_shape(outputs, inputs, tokens, dtype, threads):
    panels, parts, values = integers(outputs, inputs)
    if not native.takes_strips(panels):
        assert native.has_feature(WIDE) or not native.has_feature(FEATURE)
        return
    x = (1 + torch.randn(2, tokens, inputs) / 8).to(dtype)[1]
    before, torch_threads = compilation._PIECE, torch.get_num_threads()
    try:
        compilation._PIECE = 1
        torch.set_num_threads(threads)
        y = native.NativeProduct(panels, parts).multiply_strips(x)[:, :outputs]
    finally:
        compilation._PIECE = before
        torch.set_num_threads(torch_threads)
    exact = x.double() @ values.double().T
    assert y.shape == exact.shape
    assert (y - exact).abs().max() < 2e-6 * exact.abs().max()
    whole = native.NativeProduct(panels, parts).multiply_strips(x)[:, :outputs]
    assert torch.equal(y, whole)


def integers(outputs, inputs):
    """Panels of int4 in groups of 16, their tensors and values, float32 (outputs, inputs)."""
    codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    state = weight(Dtype.int4, True)._replace(codes=codes)
    state = state._replace(scale=torch.rand(outputs, inputs // 16) + 0.1)
    state.spec.scheme.__dict__["group"] = 16
    packed = Panels.pack(state, Arrangement.of_rows(outputs, inputs, 16))
    return *packed, dequantize(codes, state.scale, None, state.scheme)


@pytest.mark.parametrize("zeros", ["none", "one", "many", "fractions"])
@pytest.mark.parametrize("half", [16, 32])
@pytest.mark.parametrize("dtype", [Dtype.int4, Dtype.uint4])
@pytest.mark.sampled(2)
def test_the_order_of_the_kernel_of_torch(dtype, half, zeros, monkeypatch):
    """Halves of rows by columns; few and many rows are multiplied by several panels at a time."""
    points = {
        "none": None,
        "one": torch.full((70, 2), 1),
        "many": torch.randint(dtype.value.qmin, dtype.value.qmax + 1, (70, 2)),
        "fractions": torch.randint(0, 8, (70, 2)) / 4,
    }[zeros]
    for to in TYPES:
        monkeypatch.setitem(native._CHUNKS, to, 2 * 2 * half * 64)
    state = weight(dtype, points is None, points)
    panels, parts = Panels.pack(state, Arrangement.of_columns(70, 64, 32, half))
    expected = dequantize(state.codes, state.scale, points, state.scheme)
    if not native.serves(panels, parts):  # only vectors do
        assert not native.has_feature(FEATURE)
        return
    for to in TYPES:
        assert equal_bits(decoded(panels, parts, to), expected.to(to))
    assert native.is_right(panels, parts, expected, torch.bfloat16)
    assert not native.is_right(panels, parts, expected + 1e-6, torch.bfloat16)
    for rows in (1, 5):
        x = torch.randn(rows, 64)
        exact = x.double() @ expected.double().T
        y = native.NativeProduct(panels, parts).multiply(x)[:, :70]
        assert (y - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("is_fast", [False, True])
def test_bfloat16_inputs_are_multiplied_in_the_faster_type(is_fast, monkeypatch):
    monkeypatch.setattr(fast_type, "_multiplies_bfloat16_fast", lambda: is_fast)
    state = weight(Dtype.int4, True)
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, 32))
    x = torch.randn(33, 64).bfloat16()
    y = native.NativeProduct(panels, parts).multiply(x)[:, :70]
    values = dequantize(state.codes, state.scale, None, state.scheme)
    assert y.dtype == (torch.bfloat16 if is_fast else torch.float32)
    values = values.bfloat16() if is_fast else values
    exact = x.double() @ values.double().T
    assert (y - exact).abs().max() < (2.0**-8 if is_fast else 1e-6) * exact.abs().max()
    assert native.NativeProduct(panels, parts).multiply(x.float()).dtype == torch.float32


def test_threads_share_the_panels(monkeypatch):
    monkeypatch.setattr(compilation, "_PIECE", 1)
    state = weight(Dtype.int4, True)
    panels, parts = Panels.pack(state, Arrangement(70, 64, 32, 32))
    x, threads = torch.randn(3, 64), torch.get_num_threads()
    expected = native.NativeProduct(panels, parts).multiply(x)
    try:
        torch.set_num_threads(3)
        assert torch.equal(native.NativeProduct(panels, parts).multiply(x), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("is_fast", [False, True])
def test_the_rows_that_a_kernel_of_torch_takes(is_fast, monkeypatch):
    """Panels in bfloat16 are faster than the kernel for int8 from fewer rows on."""
    monkeypatch.setattr(fast_type, "_multiplies_bfloat16_fast", lambda: is_fast)
    taken = []
    kernel = KERNELS["cpu", "int8"]._replace(
        multiply=lambda panels, parts, x: taken.append(len(x)) or x @ torch.zeros(64, 96).bfloat16()
    )
    monkeypatch.setitem(KERNELS, ("cpu", "int8"), kernel)
    state = weight(Dtype.int8, True)
    panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, 32))
    method = PanelMethod(panels, ("cpu", "int8"), True, "native")
    for rows in (1, 16, 17, 32, 33):
        method.multiply(parts, torch.randn(rows, 64).bfloat16())
    assert taken == ([1, 16] if is_fast else [1, 16, 17, 32])
    method.multiply(parts, torch.randn(32, 64))  # float32 is multiplied in float32
    assert taken[-1] == 32


class TestRefusals:
    @pytest.fixture
    def right(self):
        state = weight(Dtype.int4, True)
        panels, parts = Panels.pack(state, Arrangement.of_rows(70, 64, 32))
        return panels, parts, dequantize(state.codes, state.scale, None, state.scheme)

    def test_a_right_kernel_is_used(self, right):
        assert native.serves(*right[:2])
        assert native.is_right(*right, torch.float32)

    def test_wrong_values_are_logged_once(self, right, caplog):
        panels, parts, values = right
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert not native.is_right(panels, parts, values + 1e-6, torch.float32)
        (record,) = caplog.records
        assert "int4 are not computed by kernels of numba: its values" in record.message

    @pytest.mark.parametrize("kernel", ["multiply_rows", "multiply_strips"])
    def test_wrong_products(self, right, kernel, caplog, monkeypatch):
        if kernel == "multiply_strips" and not native.takes_strips(right[0]):
            pytest.skip("no strips by these instructions")
        run = native.run_arrays

        def wrong(function, arrays, *constants):
            run(function, arrays, *constants)
            if function.python.__name__ == kernel:
                y = arrays[5] if kernel == "multiply_rows" else constants[2]
                y[0, 0] += 0.1

        monkeypatch.setattr(native, "run_arrays", wrong)
        assert not native.is_right(*right, torch.float32)
        assert "its product with" in caplog.text

    def test_a_failing_compiler(self, right, caplog, monkeypatch):
        def fail(*args):
            raise RuntimeError("no such instruction\nmore")

        monkeypatch.setattr(native, "run_arrays", fail)
        assert not native.is_right(*right, torch.float32)
        assert "numba: no such instruction." in caplog.text

    def test_small_weights_and_the_switch(self, right, monkeypatch):
        monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1 << 18)
        assert not native.serves(*right[:2])
        monkeypatch.setattr(compilation, "LEAST_ELEMENTS", 1)
        monkeypatch.setenv(compilation.SWITCH, "torch")
        assert not native.serves(*right[:2])
