from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    BFP16Spec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    PassOptions,
    QuantizationConfig,
)
from quark.torch.quantization.graph_mode.edges import (
    MovedQuantizer,
    edge_modules,
    edge_quantizers,
)
from quark.torch.quantization.graph_mode.quantization import build_graph
from quark.torch.quantization.nn.quantizer import TensorQuantizer
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    edges,
    export,
    graph_config,
    images,
    network,
)

SHAPE = (2, 4, 6, 6)


class Wrapped(nn.Module):
    """A function of layers and an input as a model."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.fc = nn.GroupNorm(2, 4), nn.Linear(144, 3)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def quantize(model, data=None, layer=EVERYTHING, **options):
    data = images(3, SHAPE) if data is None else data
    graph = export(model.eval(), *data[:1])
    return ModelQuantizer(graph_config(layer, **options)).quantize_model(graph, data)


CASES = {
    "conv, relu, flatten, linear": (
        lambda m, x: m.fc(m.conv1(x).relu().flatten(1)),
        {"x": "x", "relu": "relu", "flatten": "relu moved", "fc": "fc"},
    ),
    "relu6 after an addition": (
        lambda m, x: m.conv2(F.relu6(m.conv1(x) + x)),
        {"x": "x", "conv1": "conv1", "relu6": "relu6", "conv2": "conv2"},
    ),
    "a value that a relu and another operator read": (
        lambda m, x: (y := m.conv1(x)).relu() + y,
        {"x": "x", "conv1": "conv1", "relu": "conv1 moved", "add": "add"},
    ),
    "a relu6 that shares its input": (
        lambda m, x: F.relu6(y := m.conv1(x)) + y,
        {"x": "x", "conv1": "conv1", "relu6": "relu6", "add": "add"},
    ),
    "readers of one value": (
        lambda m, x: m.conv1(x) * m.conv2(x),
        {"x": "x", "conv1": "conv1", "conv2": "conv2", "mul": "mul"},
    ),
    "concatenation": (
        lambda m, x: torch.cat([m.conv1(x), m.conv2(x)], 1),
        {"x": "x", "conv1": "conv1", "conv2": "conv1", "cat": "conv1 moved"},
    ),
    "max pooling, transpose, slice": (
        lambda m, x: m.conv2(F.max_pool2d(m.conv1(x), 2).transpose(2, 3)[:, :, 1:]),
        {
            "x": "x",
            "conv1": "max_pool2d moved",
            "max_pool2d": "max_pool2d",
            "slice_1": "max_pool2d moved",
            "conv2": "conv2",
        },
    ),
    "average pooling": (
        lambda m, x: F.avg_pool2d(m.conv1(x), 2),
        {"x": "x", "conv1": "conv1", "avg_pool2d": "avg_pool2d"},
    ),
    "split": (
        lambda m, x: torch.matmul(*m.conv1(x).split(2, 1)),
        {
            "x": "x",
            "conv1": "conv1",
            "getitem": "conv1 moved",
            "getitem_1": "conv1 moved",
            "matmul": "matmul",
        },
    ),
    "a layer twice": (
        lambda m, x: m.conv1(m.conv1(x)),
        {"x": "x", "conv1": "conv1", "conv1_1": "conv1_1"},
    ),
    "a norm stays in float": (
        lambda m, x: m.conv2(m.norm(m.conv1(x))),
        {"x": "x", "conv1": "conv1", "group_norm": "group_norm", "conv2": "conv2"},
    ),
    "values with the names of methods": (
        lambda m, x: m.conv2(x.double().sigmoid().float()),
        {"to": "to_1", "sigmoid": "sigmoid", "to_1": "to_1_1", "conv2": "conv2"},
    ),
    "integers and their sums": (
        lambda m, x: m.conv1(x)[torch.arange(2) + 0],
        {"x": "x", "conv1": "conv1"},
    ),
}


@pytest.mark.parametrize(("function", "expected"), CASES.values(), ids=CASES)
def test_edges(function, expected):
    assert edges(quantize(Wrapped(function))) == expected


def test_inputs_alone_and_outputs_alone():
    function = CASES["max pooling, transpose, slice"][0]
    inputs = QuantizationConfig(input_tensors=INT8, weight=INT8)
    outputs = QuantizationConfig(output_tensors=INT8, weight=INT8)
    assert edges(quantize(Wrapped(function), layer=inputs)) == {
        "x": "x",
        "conv1": "conv1",
        "slice_1": "conv1 moved",
    }
    assert edges(quantize(Wrapped(function), layer=outputs)) == {
        "conv1": "max_pool2d moved",
        "max_pool2d": "max_pool2d",
        "conv2": "conv2",
    }


def test_other_specifications_get_quantizers_of_their_own():
    wide = Int8PerTensorSpec(
        **{"observer_method": "min_max", "symmetric": False, "scale_type": "float"},
        **{"round_method": "half_even", "is_dynamic": False},
    ).to_quantization_spec()
    special = {"conv2": QuantizationConfig(input_tensors=wide, weight=INT8)}
    graph = quantize(Wrapped(CASES["readers of one value"][0]), layer_quant_config=special)
    readers = {n.target: n.args[0].target for n in graph.graph.nodes if n.name in special}
    assert readers == {"conv2": "edge_quantizers.x_1"}
    quantizer = graph.get_submodule("edge_quantizers.x_1")
    assert quantizer.spec == wide and quantizer.zero_point is not None


def test_moved_values_keep_dynamic_scales_of_their_own():
    layer = replace(EVERYTHING, input_tensors=BFP16Spec(ch_axis=1).to_quantization_spec())
    layer = replace(layer, output_tensors=layer.input_tensors)
    graph = quantize(Wrapped(CASES["conv, relu, flatten, linear"][0]), layer=layer)
    assert set(edges(graph)) == {"x", "relu", "flatten", "fc"}
    assert not any(isinstance(m, MovedQuantizer) for m in graph.modules())


def rounded(x, *ranges):
    """Symmetric int8 with the range of other tensors, or its own."""
    scale = max(t.abs().max() for t in ranges or (x,)) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def test_values_are_those_of_the_formula():
    """conv1, conv2 -> concatenation -> relu: one range for both products."""
    model = Wrapped(lambda m, x: torch.cat([m.conv1(x), m.conv2(x)], 1).relu())
    (x,) = images(1, SHAPE)
    graph = quantize(model, [x], QuantizationConfig(INT8, INT8))
    with torch.no_grad():
        ranges = [conv(x) for conv in (model.conv1, model.conv2)]
        y = [conv(rounded(x)) for conv in (model.conv1, model.conv2)]
        scale = graph.edge_quantizers.conv1.scale
        expected = rounded(torch.cat(y, 1), *ranges).relu()
        assert torch.equal(graph(x), expected)
    assert scale.item() == pytest.approx(float(max(r.abs().max() for r in ranges)) / 127.5)


@pytest.mark.parametrize("method", ["min_max", "percentile", "MSE"])
def test_moved_values_are_not_observed_again(method):
    spec = Int8PerTensorSpec(
        observer_method=method,
        symmetric=True,
        scale_type="float",
        round_method="half_even",
        is_dynamic=False,
    ).to_quantization_spec()
    layer = QuantizationConfig(input_tensors=spec, output_tensors=spec)
    moved = Wrapped(lambda m, x: m.fc(F.max_pool2d(m.conv1(x), 1)[..., :].flatten(1)))
    plain = Wrapped(lambda m, x: m.conv1(x))
    graphs = [quantize(m, layer=layer) for m in (moved, plain)]
    assert torch.equal(*(edge_modules(g)["edge_quantizers.conv1"].scale for g in graphs))


@torch.no_grad()
def test_the_range_before_a_max_pool_is_that_of_the_maxima():
    model = Wrapped(lambda m, x: F.max_pool2d(m.conv1(x) - 1, 3, 2, 1))
    (x,) = images(1, SHAPE)
    graph = quantize(model, [x], QuantizationConfig(output_tensors=INT8, weight=INT8))
    assert edges(graph)["sub"] == "max_pool2d moved"
    quantizer = graph.edge_quantizers.max_pool2d
    inputs = []  # the maxima
    quantizer.register_forward_hook(lambda module, args, y: inputs.append(args[0]))
    graph.edge_quantizers.sub.train()  # passes values on: rounding them first changes nothing
    expected = graph(x)
    reach = float(inputs[0].abs().max())
    assert float(quantizer.scale) * 127.5 == pytest.approx(reach, rel=0.02)
    assert reach < 0.9 * float((model.conv1(x) - 1).abs().max())
    graph.eval()
    assert torch.equal(graph(x), expected)


def test_two_activations_of_a_layer_that_runs_twice():
    graph = quantize(Wrapped(lambda m, x: m.conv1(m.conv1(x) * 9)))
    quantizers = edge_quantizers(graph)
    assert set(quantizers) == {"x", "conv1", "mul", "conv1_1"}
    assert len({float(q.scale) for q in quantizers.values()}) == 4
    assert sum(isinstance(m, TensorQuantizer) for m in graph.conv1.modules()) == 1


def test_parameters_that_operators_add_are_quantized_too():
    graph = quantize(network("transformer"), images())
    assert edges(graph)["positions"] == "positions"
    assert edges(graph)["expand"] == "patches"  # the class token, which patches are joined to
    assert edges(graph)["cat"] == edges(graph)["transpose"] == "patches moved"


PRELU = {"x": "x", "conv1": "conv1", "prelu": "prelu", "conv2": "conv2", "gelu": "gelu"}


@pytest.mark.parametrize("is_fused", [False, True])
def test_activations_are_fused_if_asked_for(is_fused):
    model = Wrapped(lambda m, x: F.gelu(m.conv2(F.prelu(m.conv1(x), m.slope))))
    model.slope = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    options = {"pass_options": PassOptions(fused_activations=True)} if is_fused else {}
    quantized = quantize(model, **options)
    products = ("conv1", "conv2") if is_fused else ()
    assert edges(quantized) == {k: v for k, v in PRELU.items() if k not in products}
    # Example: a loaded graph has the same edges, by its configuration.
    config = quantized.quant_config
    assert edges(build_graph(export(model, images(1, SHAPE)[0]), config)) == edges(quantized)


OUTPUTS = {
    "layer": (lambda m, x: m.conv2(m.conv1(x)), {"x", "conv1"}),
    "moved": (lambda m, x: m.conv2(x).flatten(1), {"x"}),
    "relu": (lambda m, x: m.conv2(x).relu(), {"x"}),
    "pool": (lambda m, x: F.max_pool2d(m.conv2(x), 2), {"x"}),
    "two": (lambda m, x: (m.conv1(x), m.conv2(m.conv1(x)) + 1), {"x", "conv1_1", "conv2"}),
    "read": (lambda m, x: (y := m.conv1(x), m.conv2(y)), {"x", "conv1"}),
    "split": (lambda m, x: tuple(m.conv2(x).split(2, 1)), {"x"}),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_stay_in_float_if_asked_for(case):
    function, expected = OUTPUTS[case]
    model = Wrapped(function)
    quantized = quantize(model, pass_options=PassOptions(float_outputs=True))
    assert set(edges(quantized)) == expected
    every = quantize(model)
    assert set(edges(every)) > expected
    if case == "layer":  # 288 values
        (x,) = images(1, SHAPE)
        assert quantized(x).unique().numel() > 256 >= every(x).unique().numel()
    config = quantized.quant_config
    assert edges(build_graph(export(model, images(1, SHAPE)[0]), config)) == edges(quantized)


def test_values_without_the_axis_of_the_blocks_stay_in_float():
    model = Wrapped(lambda m, x: m.conv2(F.prelu(m.conv1(x), m.slope)))
    model.slope = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    spec = OCP_MXFP4Spec(ch_axis=1, is_dynamic=True).to_quantization_spec()
    layer = QuantizationConfig(weight=spec, input_tensors=spec, output_tensors=spec)
    quantized = quantize(model, layer=layer)
    expected = {name: name for name in ("x", "conv1", "prelu", "conv2")}
    assert edges(quantized) == expected
    assert torch.isfinite(quantized(images(1, SHAPE)[0])).all()
