"""Compiled products: the bits of plain decoding, sums within rounding, and refusals."""

import logging
import shutil

import pytest
import torch

from quark.torch.numerics.formats import Dtype
from quark.torch.quantization.nn.products import compiled
from quark.torch.quantization.nn.products.arrangement import Arrangement
from quark.torch.quantization.nn.products.panels import Panels
from tests.unit.quantization.nn.products.test_panels import FORMATS, weight

COMPILERS = ("c++", "g++", "clang++", "cl")
has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="this machine has no C++ compiler"
)
SHAPE_CLASSES = [(rows, zeros) for rows in (False, True) for zeros in ("none", "one", "many")]


@pytest.fixture(autouse=True)
def no_answers_of_other_tests():
    compiled._functions.cache_clear()
    yield
    compiled._functions.cache_clear()


@pytest.fixture
def not_compiled(monkeypatch):
    """The functions as Python runs them."""
    monkeypatch.setattr(compiled, "compile_function", lambda function: function)


def plain_values(panels, parts):
    values = torch.stack([panel.clone() for panel in panels.decode(parts)])
    return panels.arrangement.restore(values)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
def test_every_format_has_the_values_of_plain_decoding(dtype, not_compiled):
    for rows, zeros in SHAPE_CLASSES[: 1 + 5 * (not dtype.value.is_float)]:
        assert compiled._functions(dtype.value, rows, zeros) is not None
    panels, parts = Panels.pack(weight(dtype, True), Arrangement.of_rows(70, 64, 32, 2))
    product, x = compiled.compiled(panels, parts), torch.randn(3, 64)
    expected = plain_values(panels, parts)
    finite = torch.where(expected.isfinite(), expected, 0)
    values = product.values(panels, parts)
    assert torch.equal(torch.where(expected.isfinite(), values, 0), finite)
    y = product.multiply(panels, parts, x)
    assert y.shape == (3, 128)
    exact = x.double() @ values.double().T
    assert (y[:, :70] - exact).abs().max() < 1e-6 * exact.abs().max()


def test_all_panels_are_decoded_two_or_more_at_a_time(not_compiled, monkeypatch):
    monkeypatch.setattr(compiled, "_CHUNK", 2 * 32 * 64)
    for panels in range(2, 8):
        to = Arrangement(32 * panels, 64, 32, 32)
        chunks = list(compiled._chunks(to))
        assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(panels))
        assert {c.stop - c.start for c in chunks} <= {2, 3}


def test_infinite_values_are_left_to_plain_decoding(not_compiled):
    panels, parts = Panels.pack(weight(Dtype.fp8_e4m3, True), Arrangement.of_rows(70, 64, 32, 2))
    values, product = plain_values(panels, parts), compiled.compiled(panels, parts)
    assert compiled.is_right(product, panels, parts, values)
    parts["scale"][0, 0, 0] = float("inf")
    assert not compiled.is_right(product, panels, parts, plain_values(panels, parts))


@pytest.mark.parametrize("wrong", ["row", "panels"])
def test_a_wrong_function_is_refused_and_logged_once(monkeypatch, caplog, wrong):
    make = compiled._make

    def wrong_make(fmt):
        functions = make(fmt)
        right = getattr(functions, wrong)

        def scaled(operands, *args):
            return right(operands._replace(scale=operands.scale * 1.001), *args)

        return functions._replace(**{wrong: scaled})

    monkeypatch.setattr(compiled, "compile_function", lambda function: function)
    monkeypatch.setattr(compiled, "_make", wrong_make)
    with caplog.at_level(logging.WARNING):
        assert compiled._functions(Dtype.int3.value, False, "one") is None
        assert compiled._functions(Dtype.int3.value, False, "one") is None
    (record,) = caplog.records
    assert "int3 are not compiled" in record.message
    assert "sample is wrong" in record.message


def test_a_function_that_torch_refuses_later_is_computed_by_python(monkeypatch, caplog):
    def compile_twice(function, **options):
        calls = []

        def call(*args):
            calls.append(args)
            if len(calls) > 1:
                raise RuntimeError("recompile limit")
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compile_twice)
    compiled._log_refusal.cache_clear()
    double = compiled.compile_function(lambda x: 2 * x)
    with caplog.at_level(logging.WARNING):
        assert [double(x) for x in (1, 2, 3)] == [2, 4, 6]
    (record,) = caplog.records
    assert "recompile limit" in record.message


def test_a_missing_compiler_is_logged(monkeypatch, caplog):
    def missing(function):
        def call(*args):
            raise RuntimeError("No working C++ compiler found\nsearched: g++")

        return call

    monkeypatch.setattr(compiled, "compile_function", missing)
    with caplog.at_level(logging.WARNING):
        assert compiled._functions(Dtype.int3.value, False, "one") is None
    assert "No working C++ compiler found." in caplog.text


@torch._dynamo.config.patch(error_on_recompile=True)
def check_shapes(fmt, rows, zeros):
    for outputs, inputs in ((70, 64), (512, 96)):
        group = inputs if rows else 32
        to = Arrangement(outputs, inputs, group, 32)
        panels, parts = Panels(fmt, to, 0, 3 if zeros == "one" else 0), {}
        bits = torch.arange(outputs * inputs).remainder(1 << min(fmt.bits, 6))
        parts = compiled.pack_planes(to.arrange(bits.view(outputs, inputs).byte()), fmt)
        parts["scale"] = to.arrange_factors(torch.rand(outputs, inputs // group))
        if zeros == "many":
            points = torch.ones(outputs, inputs // group)
            parts["zero_point"] = to.arrange_factors(points.char() if fmt.bits < 8 else points)
        product = compiled.compiled(panels, parts)
        with torch.inference_mode():
            assert compiled.is_right(product, panels, parts, plain_values(panels, parts))


@has_compiler
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
def test_one_compilation_serves_all_shapes(dtype):
    for rows, zeros in SHAPE_CLASSES[:: 3 if dtype.value.is_float else 1]:
        assert compiled._functions(dtype.value, rows, zeros) is not None
        check_shapes(dtype.value, rows, zeros)
