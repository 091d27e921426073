"""Quantized graphs: other software has the codes of the graph.

ONNX Runtime, OpenVINO, ExecuTorch with XNNPACK, and Inductor run them.
"""

import platform
import shutil
from dataclasses import replace
from functools import cache

import pytest
import torch

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export import export_program
from quark.torch.quantization.config.config import (
    CLEConfig,
    Int8PerChannelSpec,
    QuantizationConfig,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.config.spec import QuantizationSpec
from quark.torch.quantization.graph_mode.edges import edge_modules
from tests.unit.quantization.graph_mode.networks import (
    INT8,
    NETWORKS,
    export,
    graph_config,
    images,
    network,
)

UINT8 = Uint8PerTensorSpec(
    "min_max", symmetric=False, scale_type="float", round_method="half_even", is_dynamic=False
).to_quantization_spec()
CHANNELS = Int8PerChannelSpec(
    ch_axis=0, symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False
).to_quantization_spec()
INT32 = QuantizationSpec("int32", symmetric=True, qscheme="per_tensor", is_dynamic=False)


def frozen(name, edges, weight=INT8, gain=1, **options):
    layer = QuantizationConfig(edges, edges, weight, INT32)
    quantizer = ModelQuantizer(graph_config(layer, **options))
    data = [gain * x for x in images(8)]
    return quantizer.freeze(quantizer.quantize_model(export(network(name)), data))


def check_codes(model, x, y):
    """At most one code in a hundred differs, by one; two of a few logits."""
    step = next(reversed(edge_modules(model).values())).scale
    with torch.no_grad():
        differences = ((model(x) - y) / step).abs()
    assert differences.max() < 1.5 and (differences > 0.5).sum() <= max(2, y.numel() // 100)


def run_openvino(graph, x):
    import openvino

    compiled = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([x.numpy()])[0])


def run_openvino_program(model, x):
    import openvino

    program = export_program(model, (x,), fold_quantize=False)
    return run_openvino(openvino.convert_model(program, example_input=(x,)), x)


class _Product(torch.nn.Module):
    """Codes times codes of the scale 1: of 8 unsigned bits times 127."""

    weight = torch.full((32, 32), 127.0)

    def forward(self, x):
        def edge(x, *limits):
            operators = torch.ops.quantized_decomposed
            codes = operators.quantize_per_tensor.default(x, 1.0, 0, *limits)
            return operators.dequantize_per_tensor.default(codes, 1.0, 0, *limits)

        weight = edge(self.weight + 0, -128, 127, torch.int8)
        return torch.nn.functional.linear(edge(x, 0, 255, torch.uint8), weight)


@cache
def openvino_saturates():
    """Whether OpenVINO adds pairs of products in 16 bits, as on x86 without VNNI."""
    import openvino
    import torch.ao.quantization.fx._decomposed  # registers the operators

    x = torch.full((1, 32), 255.0)
    program = torch.export.export(_Product(), (x,))
    y = run_openvino(openvino.convert_model(program, example_input=(x,)), x)
    return bool((y != 32 * 127 * 255).any())


def exact_weight(weight):
    """Weights whose products OpenVINO adds exactly on this CPU: of 7 bits, where it saturates."""
    return replace(weight, dtype="int7") if openvino_saturates() else weight


def run_xnnpack(model, x):
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    program = export_program(model, (x,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    operators = [str(node.target) for node in lowered.exported_program().graph.nodes]
    assert any("call_delegate" in operator for operator in operators)
    assert not any("convolution" in operator for operator in operators)
    content = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(content)  # reads the content while it runs
    return loaded.load_method("forward").execute([x])[0].clone()


@pytest.mark.client("openvino")
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "resnet"])
def test_openvino(tmp_path, name):
    """With uint8: OpenVINO 2026.4 computes layers after a concatenation of int8 wrongly.

    Without residual sums, before which it leaves out a rounding.
    """
    import openvino

    model, x = frozen(name, UINT8, exact_weight(INT8)), images(9)[8]
    export_onnx(model, tmp_path / "d", x)
    graph = openvino.Core().read_model(tmp_path / "d/quark_model.onnx")
    check_codes(model, x, run_openvino(graph, x))


@pytest.mark.client("openvino")
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("edges", "weight"),
    [(INT8, INT8), (UINT8, INT8), (UINT8, CHANNELS)],
    ids=["int8", "uint8", "uint8, channels"],
)
@pytest.mark.sampled(3)
def test_openvino_program(name, edges, weight):
    model, x = frozen(name, edges, exact_weight(weight)), images(9)[8]
    check_codes(model, x, run_openvino_program(model, x))


class _Block(torch.nn.Module):
    """x + round(conv(round(conv(x)))), all scales powers of two, so that no sum is rounded."""

    def __init__(self, rounds, slope=None):
        super().__init__()
        self.rounds, self.slope = rounds, slope
        self.weight = torch.randint(-9, 10, (16, 16, 1, 1)) / 256

    def forward(self, x):
        operators = torch.ops.quantized_decomposed

        def quantize(x, scale):
            return operators.quantize_per_tensor.default(x, scale, 0, -128, 127, torch.int8)

        def dequantize(codes, scale):
            return operators.dequantize_per_tensor.default(codes, scale, 0, -128, 127, torch.int8)

        def convolution(codes, scale):
            weight = dequantize(quantize(self.weight, 2**-8), 2**-8)
            return torch.conv2d(dequantize(codes, scale), weight)

        codes = quantize(x, 0.25)
        y = convolution(quantize(convolution(codes, 0.25), 0.25), 0.25)
        if self.slope is not None:
            y = torch.nn.functional.leaky_relu(y, self.slope)
        if self.rounds:
            y = dequantize(quantize(y, 0.25), 0.25)
        return dequantize(quantize(y + dequantize(codes, 0.25), 0.5), 0.5)


@pytest.mark.client("openvino")
@pytest.mark.parametrize("slope", [None, 1.0])
def test_openvino_leaves_out_a_rounding_between_a_convolution_and_a_sum(slope):
    """Why ``export_program`` puts an identity there. It may be needless if this fails."""
    import openvino
    import torch.ao.quantization.fx._decomposed  # registers the operators

    x = torch.randint(0, 80, (2, 16, 8, 8)) / 4
    models = []
    for rounds in (True, False):
        torch.manual_seed(0)
        models.append(_Block(rounds, slope))
    rounded, unrounded = (model(x) for model in models)
    program = torch.export.export(models[0], (x,))
    y = run_openvino(openvino.convert_model(program, example_input=(x,)), x)
    assert (rounded != unrounded).sum() > 100
    assert torch.equal(y, unrounded if slope is None else rounded)


@pytest.mark.client("openvino")
def test_openvino_has_the_codes_of_residual_blocks():
    """The 256 codes after two blocks; without the identity, 30 of them differ."""
    net, data = network("resnet"), images(9)
    net = torch.nn.Sequential(net.stem, torch.nn.ReLU(), net.pool, net.blocks).eval()
    layer = QuantizationConfig(INT8, INT8, exact_weight(INT8), INT32)
    quantizer = ModelQuantizer(graph_config(layer))
    model = quantizer.freeze(quantizer.quantize_model(export(net), data[:8]))
    check_codes(model, data[8], run_openvino_program(model, data[8]))


@pytest.mark.client("executorch")
@pytest.mark.parametrize("name", NETWORKS)
def test_xnnpack(name):
    """With int8, the only activations that XNNPACK takes."""
    model, x = frozen(name, INT8), images(9)[8]
    check_codes(model, x, run_xnnpack(model, x))


@pytest.mark.client("executorch")
@pytest.mark.client("openvino")
@pytest.mark.parametrize("name", ["resnet", "mobilenet", "unet", "mobilenet with caps"])
@pytest.mark.sampled(2)
def test_one_graph_has_the_same_codes_everywhere(run_onnx, tmp_path, name):
    """ONNX Runtime, OpenVINO and XNNPACK, each by its own way out of the same frozen graph.

    Caps are those of ReLU6 after equalization, one for each channel.
    """
    if name == "mobilenet with caps":
        weight = exact_weight(INT8)
        model = frozen("mobilenet", INT8, weight, gain=3, algo_config=[CLEConfig()])
        x = 3 * images(9)[8]
        assert any("minimum" in str(node.target) for node in model.graph.nodes)
    else:
        model, x = frozen(name, INT8, exact_weight(INT8)), images(9)[8]
    export_onnx(model, tmp_path / "d", x)
    y = {
        "onnxruntime": run_onnx(tmp_path / "d", x)[0],
        "openvino": run_openvino_program(model, x),
        "xnnpack": run_xnnpack(model, x),
    }
    step = next(reversed(edge_modules(model).values())).scale
    codes = {software: (values / step).round() for software, values in y.items()}
    assert codes["openvino"].unique().numel() > 5
    for software, values in y.items():
        check_codes(model, x, values)
        differs = (codes[software] != codes["openvino"]).sum()
        assert differs <= max(2, values.numel() // 100)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="products of integers on x86")
def test_inductor(monkeypatch):
    """With weights per channel, for which Inductor has patterns."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setattr(config, "freezing", True)
    model, x = frozen("mobilenet", UINT8, CHANNELS), images(9)[8]
    with torch.no_grad():
        y, code = run_and_get_code(torch.compile(export_program(model, (x,)).module()), x)
    assert "qconv" in code[0] and "qlinear" in code[0]
    check_codes(model, x, y)
