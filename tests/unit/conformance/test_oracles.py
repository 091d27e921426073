"""Numbers of this package against definitions and all other software that is installed."""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch

from quark.conformance import definitions, results
from quark.conformance.comparison import Comparison, compare
from quark.conformance.oracles import integer_products, transformer_engine
from quark.conformance.oracles.definitions import compare_all
from quark.conformance.registry import ORACLES, is_installed, run
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.formats import Dtype

EVERY = 331  # one 16-bit value of so many
IN_DEV = {
    "definitions",
    "torch",
    "ml_dtypes",
    "onnx",
    "onnxruntime",
    "gguf",
}  # what the tests are installed with


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning:onnx")
@pytest.mark.parametrize("name", ORACLES)
def test_no_differences(name):
    if not is_installed(name):
        assert name not in IN_DEV
        pytest.skip(f"{name} is not installed")
    comparisons = list(run(name, EVERY))
    assert sum(c.values for c in comparisons) > 100
    assert [c for c in comparisons if c.differences] == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORACLES)
def test_no_differences_of_any_value(name):
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    assert [c for c in run(name) if c.differences] == []


def test_every_format_is_compared():
    formats = {c.format for c in compare_all(10_007)}
    others = {"int32"}  # wide
    assert formats >= {dtype.name for dtype in Dtype} - others


@pytest.mark.parametrize(
    ("name", "mode", "x", "expected"),
    [
        ("fp4", "half_even", [0.25, 0.75, 2.5, -5, 7, -0.1], [0, 1, 2, -4, 6, -0.0]),
        ("fp4", "round", [0.25, 0.75, 2.5, -5, 7, -0.1], [0.5, 1, 3, -6, 6, -0.0]),
        ("fp4", "floor", [0.4, 1.9, -0.1, -7], [0, 1.5, -0.5, -6]),
        ("int3", "half_even", [-4.5, -0.5, 0.5, 1.5, 9], [-4, 0, 0, 2, 3]),
        ("fp8_e5m3", "half_even", [-1, 0.5, 1e6], [0, 0.5, 114688]),
    ],
)
def test_definition_of_rounding(name, mode, x, expected):
    rounded = definitions.nearest(torch.tensor(x), Dtype[name].value, RoundType[mode])
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert rounded.equal(wanted) and rounded.signbit().equal(wanted.signbit())


def test_magnitudes():
    assert definitions.magnitudes(Dtype.fp4.value).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert len(definitions.magnitudes(Dtype.fp8_e4m3.value)) == 127  # the last code is NaN
    assert definitions.magnitudes(Dtype.float16.value)[-1] == 65504


def test_definition_of_two_levels():
    """Example of NVFP4: amax 12, so the tensor scale is 12 / 2688 and the block scale 448."""
    x = torch.zeros(2, 16)
    x[0, :3] = torch.tensor([12.0, -5.0, 1.0])
    values = definitions.two_level_blocks(x, Dtype.fp4.value, Dtype.fp8_e4m3.value)
    assert values[0, :3].allclose(torch.tensor([12.0, -4.0, 1.0]), rtol=1e-6)
    assert not values[1].any()


def test_words():
    assert definitions.words(torch.tensor([[1, 2, 3, 7]]), 3, 2) == [
        (1 | 2 << 3 | 3 << 6 | 7 << 9).to_bytes(2, "little")
    ]


def test_differences_are_counted():
    ours, defined = torch.tensor([0.0, 1, torch.nan, 3]), torch.tensor([-0.0, 1, torch.nan, 4])
    theirs = torch.tensor([-0.0, 2, torch.nan, 4])
    result = compare("fp4", "round", ours, defined, theirs, torch.arange(4.0))
    example = "of 0, here 0, defined -0, theirs -0"
    assert result == Comparison("fp4", "round", 4, 2, 1, example)


def test_results_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"fp4, cast: \[\(3,\), \(2,\)\] do not compare"):
        compare("fp4", "cast", torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("oracle", ["definitions", "ml_dtypes"])
def test_a_wrong_rounding_is_a_difference(monkeypatch, oracle):
    """Ties of this package go away from zero."""
    if not is_installed(oracle):
        pytest.skip(f"{oracle} is not installed")
    right, module = results.rounded, import_module(ORACLES[oracle].partition(":")[0])

    def wrong(x, fmt, mode=RoundType.half_even):
        return right(x, fmt, RoundType.round if fmt.name == "fp4" else mode)

    monkeypatch.setattr(module, "rounded", wrong)
    differing = [c for c in run(oracle, EVERY) if c.differences]
    assert differing and {c.format for c in differing} == {"fp4"}
    assert all(c.deviations == 0 for c in differing)


def test_a_wrong_zero_point_is_a_difference(monkeypatch):
    """Values of a convolution and of a product of matrices, off by a step of the output."""
    for name in ("onnx", "onnxruntime"):
        if not is_installed(name):
            pytest.skip(f"{name} is not installed")
    right = integer_products.codes_of

    def wrong(values, scale, zero):
        return right(values, scale, zero) + 1

    monkeypatch.setattr(integer_products, "codes_of", wrong)
    for name in ("onnx", "onnxruntime"):
        differing = {c.operation.lower().split(",")[0] for c in run(name, EVERY) if c.differences}
        assert any(n.startswith("qlinearconv") for n in differing), name
        assert all(n.startswith("qlinear") for n in differing), name


def test_transformer_engine_is_read_without_its_libraries(monkeypatch, tmp_path):
    """Its package does not import here, but the file of its reference is executed."""
    package = "transformer_engine"
    recipes = tmp_path / package / "pytorch" / "custom_recipes"
    recipes.mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text("raise ImportError('no CUDA')")
    (recipes / "reference_utils.py").write_text("FORMAT = 'E2M1'")
    (recipes / "reference_nvfp4.py").write_text(
        f"from {package}.pytorch.custom_recipes import gemm, reference_utils\n"
        f"from {package}.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer\n"
        "class NVFP4QuantizerRef(Quantizer):\n"
        "    kind = reference_utils.FORMAT, gemm.GEMMType.FPROP\n"
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    earlier = ModuleType(f"{package}.common")
    monkeypatch.setitem(sys.modules, earlier.__name__, earlier)
    assert transformer_engine._reference().NVFP4QuantizerRef.kind == ("E2M1", None)
    assert {n: m for n, m in sys.modules.items() if package == n.partition(".")[0]} == {
        earlier.__name__: earlier
    }
