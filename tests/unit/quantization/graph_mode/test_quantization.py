import pytest
import torch
from torch import fx, nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import AWQConfig, Config, QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    NETWORKS,
    SHAPE,
    export,
    graph_config,
    images,
    network,
)


def quantize(graph, data=None, **options):
    return ModelQuantizer(graph_config(**options)).quantize_model(graph, data or images())


@pytest.mark.parametrize("name", NETWORKS)
def test_a_frozen_graph_computes_what_the_quantized_graph_does(name):
    model, x = network(name), images(1)[0]
    graph = export(model)
    quantized = quantize(graph)
    with torch.no_grad():
        expected, y = model(x), quantized(x)
        error = (y - expected).norm() / expected.norm()
        assert 0 < error < 0.15
        assert torch.equal(graph(x), expected)  # the graph given is as it was
        frozen = ModelQuantizer.freeze(quantized)
        assert frozen is quantized and torch.equal(frozen(x), y)
    weight = dict(frozen.named_parameters())[next(n for n, p in model.named_parameters())]
    assert isinstance(frozen, fx.GraphModule) and weight.unique().numel() <= 255


def test_weights_alone_give_the_bits_of_eager_mode():
    weights = QuantizationConfig(weight=INT8)
    model, x = network("unet"), images(1)[0]
    graph = ModelQuantizer(graph_config(weights)).quantize_model(export(model))
    eager = ModelQuantizer(Config(weights)).quantize_model(model)
    with torch.no_grad():
        assert torch.equal(ModelQuantizer.freeze(graph)(x), ModelQuantizer.freeze(eager)(x))


def test_global_configurations_quantize_convolutions_of_any_rank():
    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.three = nn.Conv1d(4, 4, 3), nn.Conv3d(4, 4, 1)

        def forward(self, x):
            return self.three(self.one(x)[:, :, None, None])

    graph = export(Convolutions().eval(), torch.randn(1, 4, 8))
    quantized = quantize(graph, [torch.randn(1, 4, 8)])
    layers = [m for m in quantized.modules() if isinstance(m, FakeQuantizedLayer)]
    assert [layer.float_class for layer in layers] == [nn.Conv1d, nn.Conv3d]


def quantized_eagerly():
    """The graph of a model that eager mode has quantized."""
    config = Config(QuantizationConfig(INT8, weight=INT8), log_severity_level=3)
    model = ModelQuantizer(config).quantize_model(network("resnet"), images())
    return export(ModelQuantizer.freeze(model))


EAGER = Config(EVERYTHING, log_severity_level=3)


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (lambda: export(network("unet")), EAGER, "set quant_mode=QuantizationMode.fx_graph_mode"),
        (lambda: network("unet"), graph_config(), r"torch.export.export\(model.eval\(\), args\)"),
        (lambda: quantize(export(network("unet"))), graph_config(), "is quantized already"),
        (quantized_eagerly, graph_config(), "an operator of a quantized model: export the float"),
    ],
    ids=[
        "a graph in eager mode",
        "a module in graph mode",
        "a quantized graph",
        "frozen eagerly",
    ],
)
def test_what_does_not_go_with_the_mode_is_refused(make, config, message):
    with pytest.raises(ValueError, match=message):
        ModelQuantizer(config).quantize_model(make(), images())


def test_static_ranges_need_data():
    for data in (None, []):
        with pytest.raises(ValueError, match="Static activation ranges need calibration data"):
            ModelQuantizer(graph_config()).quantize_model(export(network("unet")), data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([torch.randn(3, *SHAPE[1:])], r"shape \(3, 3, 16, 16\).*\(2, 3, 16, 16\).*dynamic_shapes"),
        ([torch.randn(2, 3, 20, 16)], r"Batch 0 .*shape \(2, 3, 20, 16\).*data of this shape"),
        ([*images(1), images(1)[0].double()], "Batch 1 .*float64.*float32"),
        ([*images(2), torch.randn(4, 3, 20, 16)], r"Batch 2 .*shape \(4, 3, 20, 16\)"),
        ([torch.cat(images(2)), images(1)[0] / 0], "Batch 1 .*: x has values that are NaN"),
        ([(images(1)[0], images(1)[0])], "has 2 values, but the graph takes 1: x"),
        ([{"image": images(1)[0]}], "has image, but the graph takes x"),
        ([*images(1), images(1)[0] / 0], "Batch 1 .*: x has values that are NaN or infinite"),
    ],
    ids=["rows", "size", "type", "later size", "later values", "number", "name", "values"],
)
def test_data_that_the_graph_does_not_take_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        quantize(export(network("unet")), data)


@pytest.mark.parametrize(("rows", "batch"), [(1, 2), (8, 2), (1, None)])
def test_the_batches_of_the_data_do_not_matter(rows, batch):
    data = torch.cat(images(4))
    shapes = {} if batch else {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    graph = export(network("mobilenet"), **shapes)
    x = images(1)[0]
    with torch.no_grad():
        expected = quantize(graph, images(4))(x)
        assert torch.equal(quantize(graph, list(data.split(rows)))(x), expected)


def test_graphs_take_mappings_and_several_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, a, b):
            return self.fc(a) - b

    a, b = torch.randn(2, 4), torch.randn(2, 4)
    graph = export(Sum().eval(), a, b)
    one, other = quantize(graph, [(a, b)]), quantize(graph, [{"b": b, "a": a}])
    assert torch.equal(one(a, b), other(a=a, b=b))


def test_graphs_are_frozen_in_evaluation_mode():
    quantized = quantize(export(network("unet"))).train()
    with pytest.raises(ValueError, match=r"call freeze\(model.eval\(\)\)"):
        ModelQuantizer.freeze(quantized)
    assert not any(m.frozen for m in quantized.modules() if isinstance(m, FakeQuantizedLayer))
    assert ModelQuantizer.freeze(quantized.eval()) is quantized


def test_graphs_of_fixed_batches_run_on_whole_batches():
    """The class token of the transformer is expanded to two rows in the graph."""
    model, data = network("transformer"), images(4)
    graph = export(model)
    config = graph_config(QuantizationConfig(weight=INT8), algo_config=[AWQConfig()])
    one = ModelQuantizer(config).quantize_model(graph, data)
    other = ModelQuantizer(config).quantize_model(graph, [{"x": x} for x in data])
    with torch.no_grad():
        assert torch.equal(one(data[0]), other(data[0]))
        assert (one(data[0]) - model(data[0])).norm() < 0.05 * model(data[0]).norm()


def test_proofs_take_two_samples_of_a_batch(monkeypatch):
    """One alone, both before and after the rewrites of all passes, and one for movements."""
    run, samples = fx.Interpreter.run, []

    def record(self, *args, **options):
        samples.append(len(args[0]))
        return run(self, *args, **options)

    monkeypatch.setattr(fx.Interpreter, "run", record)
    batch = torch.export.Dim("batch")
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()
    graph = export(
        nn.Sequential(*layers).eval(), torch.randn(8, 3, 8, 8), dynamic_shapes=({0: batch},)
    )
    quantize(graph, [torch.randn(8, 3, 8, 8)])
    assert sorted(samples) == [1, 1, 2, 2]
