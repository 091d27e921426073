"""Quantized graphs as ONNX files, run by ONNX Runtime."""

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from quark.torch import ModelExporter, ModelQuantizer, export_onnx
from quark.torch.export.onnx.runtime import OnnxSession
from quark.torch.quantization.config.config import (
    BFP16Spec,
    Config,
    FP8E4M3PerTensorSpec,
    QuantizationConfig,
)
from quark.torch.quantization.graph_mode.edges import edge_modules
from tests.unit.quantization.graph_mode.networks import (
    CHANNELS,
    EVERYTHING,
    INT8,
    INT32,
    NETWORKS,
    UINT8,
    export,
    frozen_graph,
    images,
    network,
)

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

LAYERS = {
    "int8": replace(EVERYTHING, bias=INT32),
    "uint8": QuantizationConfig(UINT8, UINT8, CHANNELS, INT32),
}


def frozen(model, layer=LAYERS["int8"], data=None, **options):
    data = images(8) if data is None else data
    return frozen_graph(export(model.eval(), data[0], **options), layer, data)


def write(model, path, x, **options):
    export_onnx(model, path, x, **options)
    return path / "quark_model.onnx", onnx.load(path / "quark_model.onnx")


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the codes on its edges, in the order of the graph."""

    def __init__(self, graph):
        super().__init__(graph)
        self.edges, self.codes = edge_modules(graph), []

    def call_module(self, target, args, kwargs):
        y = super().call_module(target, args, kwargs)
        quantizer = self.edges.get(target)
        if quantizer is not None:
            zeros = 0 if quantizer.zero_point is None else quantizer.zero_point
            self.codes.append((y / quantizer.scale).round() + zeros)
        return y


def codes_of(model, x):
    recorder = Recorder(model)
    with torch.no_grad():
        recorder.run(x)
    return recorder.codes


def codes_in_runtime(path, graph, x):
    """The outputs of all QuantizeLinear, in the order of the graph."""
    for node in graph.graph.node:
        if node.op_type == "QuantizeLinear":
            graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    onnx.save(graph, path.with_name("codes.onnx"))
    return OnnxSession(path.with_name("codes.onnx")).run(x)[1:]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param(name, layer, marks=() if runs_daily else pytest.mark.nightly)
        for name in NETWORKS
        for layer in LAYERS
        for runs_daily in [(name == "mobilenet") == (layer == "uint8")]
    ],
)
@pytest.mark.sampled(2)
def test_onnx_runtime_has_the_codes_of_the_graph(tmp_path, name, layer):
    """Norms, softmax and GELU differ in their last bits, so values at ties may go either way."""
    model, x = frozen(network(name), LAYERS[layer]), images(9)[8]
    path, graph = write(model, tmp_path / "d", x)
    [y] = OnnxSession(path).run(x)
    with torch.no_grad():
        expected = model(x)
    step = next(reversed(edge_modules(model).values())).scale
    final = ((y - expected) / step).abs()
    differences = [
        (ours - theirs.float()).abs().flatten()
        for ours, theirs in zip(codes_of(model, x), codes_in_runtime(path, graph, x), strict=True)
    ]
    assert len(differences) >= 8
    differences = torch.cat(differences)
    share = (differences > 0).float().mean()
    if name == "transformer":
        assert final.max() < 1.5 and differences.max() <= 2 and share < 0.03
    else:
        assert final.max() < 0.5 and differences.max() <= 1 and share < 0.001


def test_every_edge_is_a_pair_with_names_of_the_model(tmp_path):
    model, (x,) = frozen(network("resnet")), images(1)
    _, graph = write(model, tmp_path / "d", x, output_names=["logits"])
    nodes = {node.name: node for node in graph.graph.node}
    assert len(nodes) == len(graph.graph.node)
    conv = nodes["blocks.0.conv1/Conv"]
    assert [*conv.input] == [
        "max_pool2d_dequantized",
        "blocks.0.conv1.weight",
        "blocks.0.conv1.bias",
    ]
    readers = [n.op_type for n in graph.graph.node if set(n.input) & {*conv.output}]
    assert readers == ["Relu"]
    types = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    assert types["blocks.0.conv1.weight.codes"] == onnx.TensorProto.INT8
    assert types["blocks.0.conv1.bias.codes"] == onnx.TensorProto.INT32
    pairs = [n for n in nodes if n.endswith("/QuantizeLinear")]
    assert len(pairs) == len(edge_modules(model)) == 12
    assert [output.name for output in graph.graph.output] == ["logits"]
    assert not any("symbolic" in name for node in nodes.values() for name in node.output)


def test_the_runtime_fuses_integer_convolutions(tmp_path):
    model, (x,) = frozen(network("mobilenet"), LAYERS["uint8"]), images(1)
    path, _ = write(model, tmp_path / "d", x)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    operators = [n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operators.count("QLinearConv") == 4 and "Conv" not in operators


class Twice(nn.Module):
    """A layer that runs on two inputs, the second ten times as large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(10 * self.conv(x))


def test_a_bias_with_another_scale_than_its_products_is_stored_as_values(tmp_path):
    """QLinearConv takes an int32 bias in the scale of its products alone."""
    model, x = frozen(Twice()), images(9)[8]
    path, graph = write(model, tmp_path / "d", x)
    types = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    assert types["conv.bias"] == onnx.TensorProto.FLOAT and "conv.bias.codes" not in types
    [y] = OnnxSession(path).run(x)
    step = next(reversed(edge_modules(model).values())).scale
    assert (y - model(x)).abs().max() < 1.5 * step


def test_axes_of_any_size_are_those_of_the_graph(tmp_path):
    x, shapes = images(9)[8], ({0: torch.export.Dim("rows")},)
    fixed, free = (frozen(network("transformer"), dynamic_shapes=s) for s in (None, shapes))
    for model, sizes in ((fixed, [2, 3, 16, 16]), (free, ["batch", 3, 16, 16])):
        path, graph = write(model, tmp_path / str(sizes[0]), x)
        axes = graph.graph.input[0].type.tensor_type.shape.dim
        assert [axis.dim_param or axis.dim_value for axis in axes] == sizes
    y = torch.cat([OnnxSession(path).run(x[:1])[0], OnnxSession(path).run(x[1:])[0]])
    step = next(reversed(edge_modules(free).values())).scale
    assert (y - free(x)).abs().max() < 1.5 * step


def test_other_formats_are_functions(tmp_path):
    """Edges before weights in fp8 have no pairs, which the runtime does not load."""
    bfp16 = BFP16Spec(ch_axis=1).to_quantization_spec()
    fp8 = FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False).to_quantization_spec()
    for name, layer in {
        "bfp16": QuantizationConfig(bfp16, bfp16, bfp16),
        "int8 by fp8": QuantizationConfig(INT8, INT8, fp8),
    }.items():
        model, x = frozen(network("resnet"), layer), images(9)[8]
        path, _ = write(model, tmp_path / name, x)
        [y], expected = OnnxSession(path).run(x), model(x)
        assert (y - expected).norm() < 0.02 * expected.norm()


def test_verification_compares_edges_by_their_median(tmp_path):
    exporter = ModelExporter(export_dir=tmp_path / "d", verify=True)
    model, x = frozen(network("unet"), EVERYTHING), images(9)[8]
    exporter.export_onnx_model(model, x)
    assert exporter.verdict.compared == "outputs"


def test_edges_without_an_operator_are_refused_before_work(tmp_path):
    down = replace(INT8, round_method="round")
    model, (x,) = frozen(network("resnet"), replace(EVERYTHING, input_tensors=down)), images(1)
    with pytest.raises(ValueError, match=r"cannot hold the edge x: it rounds half to even"):
        export_onnx(model, tmp_path / "d", x)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.randn(2, 4, 16, 16), r"\(2, 4, 16, 16\), but the graph takes \(2, 3, 16, 16\)"),
        ((torch.randn(3, 16, 16),), r"\(3, 16, 16\), but the graph takes \(2, 3, 16, 16\)"),
        ({"x": torch.ones(2, 3, 16, 16).int()}, "x is torch.int32, but the graph takes .*float32"),
        (None, "input_args is missing: give an example of the inputs"),
    ],
    ids=["channels", "rank", "type", "nothing"],
)
def test_inputs_that_the_graph_does_not_take_are_refused(tmp_path, inputs, message):
    with pytest.raises(ValueError, match=message):
        export_onnx(frozen(network("resnet")), tmp_path / "d", inputs)
    assert not (tmp_path / "d").exists()


def test_inputs_that_a_model_does_not_take_are_refused(tmp_path):
    config = Config(QuantizationConfig(weight=INT8))
    model = ModelQuantizer(config).quantize_model(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(ValueError, match=r"does not run on input_args \(input: \(1, 4, 8, 8\)"):
        export_onnx(ModelQuantizer.freeze(model), tmp_path / "d", torch.randn(1, 4, 8, 8))
    assert not (tmp_path / "d").exists()
