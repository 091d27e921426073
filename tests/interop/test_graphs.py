"""Quantized graphs in OpenVINO, ExecuTorch with XNNPACK, and Inductor: the codes of the graph."""

import platform
import shutil

import pytest
import torch

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export import export_program
from quark.torch.quantization.config.config import (
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


def frozen(name, edges, weight=INT8):
    quantizer = ModelQuantizer(graph_config(QuantizationConfig(edges, edges, weight, INT32)))
    return quantizer.freeze(quantizer.quantize_model(export(network(name)), images(8)))


def check_codes(model, x, y):
    """At most one code in a hundred differs, by one; two of a few logits."""
    step = next(reversed(edge_modules(model).values())).scale
    with torch.no_grad():
        differences = ((model(x) - y) / step).abs()
    assert differences.max() < 1.5 and (differences > 0.5).sum() <= max(2, y.numel() // 100)


@pytest.mark.client("openvino")
@pytest.mark.parametrize("name", NETWORKS)
def test_openvino(tmp_path, name):
    """With uint8: OpenVINO 2026.4 computes layers after a concatenation of int8 wrongly."""
    import openvino

    model, x = frozen(name, UINT8), images(9)[8]
    export_onnx(model, tmp_path / "d", x)
    graph = openvino.Core().read_model(tmp_path / "d/quark_model.onnx")
    compiled = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    check_codes(model, x, torch.from_numpy(compiled([x.numpy()])[0]))


@pytest.mark.client("executorch")
@pytest.mark.parametrize("name", NETWORKS)
def test_xnnpack(name):
    """With int8, the only activations that XNNPACK takes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    model, x = frozen(name, INT8), images(9)[8]
    program = export_program(model, (x,))
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    operators = [str(node.target) for node in lowered.exported_program().graph.nodes]
    assert any("call_delegate" in operator for operator in operators)
    assert not any("convolution" in operator for operator in operators)
    content = lowered.to_executorch().buffer
    loaded = Runtime.get().load_program(content)  # reads the content while it runs
    method = loaded.load_method("forward")
    check_codes(model, x, method.execute([x])[0].clone())


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
