"""Activations in the arithmetic that ONNX has, run by ONNX Runtime: the bits of our numerics."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export.onnx.functions import FunctionTable
from quark.torch.export.onnx.layers import OnnxLayer
from quark.torch.export.onnx.scales import floor_power_of_two, round_to_float
from quark.torch.numerics.enumerations import RoundType
from quark.torch.numerics.exponents import exponent_of, power_of_two
from quark.torch.numerics.formats import Dtype
from quark.torch.numerics.rounding import round_to_grid_
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.mx_elements import MX_ELEMENTS
from quark.torch.quantization.config.presets import scheme
from quark.torch.quantization.config.spec import QuantizationSpec
from tests.unit.numerics import kinds

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

FLOATS = [*kinds.FLOATS, *kinds.UNSIGNED_FLOATS]
GROUPS = {"qscheme": "per_group", "ch_axis": -1, "group_size": 32, "is_dynamic": True}


def mx(element, mode="even", **rest):
    return QuantizationSpec(
        "mx",
        **{"mx_element_dtype": element, "ch_axis": -1, "scale_calculation_mode": mode, **rest},
    )


SPECS = {
    **{f"mx {e} {m}": mx(e, m) for e in MX_ELEMENTS for m in ("even", "floor", "ceil")},
    "mx fp4 in groups of 16": mx("fp4", group_size=16),
    "mx fp4 along tokens": mx("fp4", ch_axis=1),
    "mx6": scheme("mx6").input_tensors,
    "mx9": scheme("mx9").input_tensors,
    "bfp16": scheme("bfp16").input_tensors,
    "nvfp4": scheme("nvfp4").input_tensors,
    **{f"{e} in groups": QuantizationSpec(e, **GROUPS) for e in ("fp4", "fp6_e3m2", "fp8_e5m3")},
    "fp4 by e5m3": QuantizationSpec("fp4", scale_format="e5m3", **GROUPS),
    "fp4 by e8m0": QuantizationSpec("fp4", scale_format="e8m0", **GROUPS),
    "int8 by powers of two": QuantizationSpec("int8", scale_type="pof2", **GROUPS),
    "uint8 by powers of two": QuantizationSpec("uint8", scale_type="pof2", **GROUPS),
    "int8 per token by powers of two": QuantizationSpec(
        "int8", qscheme="per_channel", ch_axis=-1, is_dynamic=True, scale_type="pof2"
    ),
    **{f"{e} static": QuantizationSpec(e, qscheme="per_tensor", is_dynamic=False) for e in FLOATS},
}


def values(rows=24, columns=68):
    """Ordinary values, in blocks of any size from zeros to the largest, on ties and beside them."""
    x = torch.randn(rows, 64, columns)
    grid = torch.randint(-64, 65, x.shape) / 16.0  # ties of every format, and codes themselves
    x[: rows // 2] = grid[: rows // 2]
    x[rows // 4 : rows // 2] *= 1 + torch.randint(-1, 2, (rows // 4, 64, columns)) * 2.0**-23
    sizes = torch.exp2(torch.randint(-40, 40, (rows, 64, 1)).float())
    sizes[:, 0] = 0.0
    sizes[:, 1] = 2.0**-120
    sizes[:, 2] = 2.0**120
    sizes[:, 3] = 2.0**126  # up to the largest values of float32
    return (x * sizes).clamp(-3.3e38, 3.3e38)


class Identity(nn.Module):
    """A layer for each specification that quantizes its inputs and does nothing else."""

    def __init__(self, count, columns):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(columns, columns, bias=False) for _ in range(count))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, run_onnx):
    """What the model and the graph return for each specification."""
    x = values()
    layers = {
        f"layers.{i}": QuantizationConfig(input_tensors=SPECS[name]) for i, name in enumerate(SPECS)
    }
    model = Identity(len(layers), x.shape[-1]).eval()
    quantizer = ModelQuantizer(Config(QuantizationConfig(), layer_quant_config=layers))
    model = quantizer.freeze(quantizer.quantize_model(model, [torch.randn(2, 64, x.shape[-1])]))
    path = tmp_path_factory.mktemp("onnx") / "out"
    export_onnx(model, path, x[:2])
    with torch.no_grad():
        expected = [layer.input_quantizer(x) for layer in model.layers]
    results = zip(run_onnx(path, x), expected, strict=True)
    return dict(zip(SPECS, results, strict=True)), x


@pytest.mark.parametrize("name", SPECS)
def test_the_runtime_rounds_to_the_same_bits(outputs, name):
    found, x = outputs
    found, expected = found[name]
    assert found.equal(expected)
    assert not expected.equal(x) and expected.unique().numel() > 8


@pytest.mark.parametrize("name", ["mxfp4", "mx9", "nvfp4", "int8"])
def test_what_a_layer_computes_with_is_where_the_layer_is(name, quantize):
    layers = nn.Sequential(nn.Linear(64, 64))
    config = Config(QuantizationConfig(input_tensors=scheme(name).input_tensors))
    layer = quantize(layers, config, [torch.randn(2, 64)])[0].to("meta")
    assert all(buffer.is_meta for buffer in OnnxLayer(layer, False, FunctionTable()).buffers())


def run(compute, x, tmp_path, run_onnx):
    """Return what ONNX Runtime computes: ``compute(op, x)`` adds the operators."""
    import onnx_ir as ir
    from onnxscript import GraphBuilder

    graph = ir.Graph([], [], nodes=[], name="graph", opset_imports={"": 20})
    builder = GraphBuilder(graph)
    builder.add_output(compute(builder.op, builder.input("x", ir.DataType.FLOAT, ["n"])), "y")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "quark_model.onnx")
    return run_onnx(tmp_path, x)[0]


@pytest.mark.parametrize("name", FLOATS)
def test_floats_on_their_grid(name, tmp_path, run_onnx):
    fmt = Dtype[name].value
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32)
    ties = torch.arange(-(2**12), 2**12) * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits - 1)
    x = torch.cat([bits.view(torch.float32), ties])
    x = x[~x.isnan()]
    expected = round_to_grid_(x.clone(), fmt, RoundType.half_even)
    result = run(lambda op, x: round_to_float(op, x, fmt), x, tmp_path, run_onnx)
    assert result.equal(expected)
    assert result.signbit().equal(expected.signbit())


def test_the_largest_power_of_two_below_a_value(tmp_path, run_onnx):
    powers = power_of_two(torch.arange(-127, 128, dtype=torch.int32))
    edges = powers.repeat(3).view(torch.int32) + torch.tensor([-1, 0, 1]).repeat_interleave(255)
    x = torch.cat([edges.to(torch.int32).view(torch.float32), torch.rand(10_000), torch.zeros(1)])
    result = run(floor_power_of_two, x, tmp_path, run_onnx)
    assert result.equal(power_of_two(exponent_of(x)))
