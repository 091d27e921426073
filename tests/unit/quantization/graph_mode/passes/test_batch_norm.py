"""Batch norms become part of layers; the eager model is the oracle."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.graph_mode.passes.preparation import prepare


def check_same(model, graph, *inputs):
    torch.testing.assert_close(graph(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


LAYERS = {
    "conv": (nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)),
    "conv without bias": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)),
    "transposed and grouped": (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "without affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)),
    "same padding": (nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d(6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_norm_goes_into_the_layer_before_it(net, export, operations, image, name):
    layer, norm = LAYERS[name]
    model = net(lambda m, x: m.norm(m.layer(x)).relu(), layer=layer, norm=norm)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    graph = prepare(export(model, image), (image,))
    assert operations(graph).keys() & {"batch_norm"} == set()
    assert sum(operations(graph).values()) == 2  # the layer and the activation
    assert {n for n, _ in graph.named_parameters()} == {"layer.weight", "layer.bias"}
    assert list(graph.named_buffers()) == []
    check_same(model, graph, image)
    for key, value in model.state_dict().items():  # the float model is as it was
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Linear(4, 6), nn.BatchNorm1d(6), (3, 4)),
        (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (3, 4, 8)),
        (nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6), (2, 4, 3, 3, 3)),
        (nn.ConvTranspose1d(4, 6, 2), nn.BatchNorm1d(6), (2, 4, 3)),
    ],
)
def test_layers_of_other_ranks(net, export, operations, layer, norm, shape):
    model, x = net(lambda m, x: m.norm(m.layer(x)), layer=layer, norm=norm), torch.randn(shape)
    graph = prepare(export(model, x), (x,))
    assert sum(operations(graph).values()) == 1
    check_same(model, graph, x)


def test_channels_of_tokens_are_another_axis(net, export, operations):
    """After (batch, 5, features), the batch norm sees 5 channels, which no weight has."""
    model = net(lambda m, x: m.norm(m.layer(x)), layer=nn.Linear(4, 5), norm=nn.BatchNorm1d(5))
    x = torch.randn(3, 5, 4)
    graph = prepare(export(model, x), (x,))
    assert operations(graph) == {"linear": 1, "conv1d": 1}
    check_same(model, graph, x)


def test_a_layer_that_is_read_twice_keeps_its_weight(net, export, operations, image):
    def function(m, x):
        y = m.conv(x)
        return m.norm(y) + y

    model = net(function, conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    original = export(model, image)
    graph = prepare(original, (image,))
    assert operations(graph) == {"conv2d": 2, "add": 1}
    assert graph.conv.weight is original.conv.weight
    assert graph.norm.weight.shape == (6, 1, 1, 1)
    check_same(model, graph, image)


def test_a_module_that_is_called_twice_is_folded_once(net, export, operations, image):
    def function(m, x):
        return m.norm(m.conv(m.norm(m.conv(x)).relu()))

    model = net(function, conv=nn.Conv2d(4, 4, 3, padding=1), norm=nn.BatchNorm2d(4))
    graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 2, "relu": 1}
    assert len(list(graph.parameters())) == 2
    check_same(model, graph, image)


def test_one_weight_before_two_batch_norms(net, export, operations, image):
    def function(m, x):
        return m.second(m.conv(m.first(m.conv(x)).relu()))

    members = {"first": nn.BatchNorm2d(4), "second": nn.BatchNorm2d(4)}
    model = net(function, conv=nn.Conv2d(4, 4, 3, padding=1), **members)
    graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 4, "relu": 1}
    check_same(model, graph, image)


@pytest.mark.parametrize("padding", [0, 1])
def test_before_a_convolution(net, export, operations, image, padding):
    """With padding the border would see zeros where the batch norm has its shift."""
    conv = nn.Conv2d(4, 6, 3, padding=padding, groups=2)
    model = net(lambda m, x: m.conv(m.norm(x)), norm=nn.BatchNorm2d(4), conv=conv)
    graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 1 + padding}
    check_same(model, graph, image)


def test_before_two_linear_layers(net, export, operations):
    def function(m, x):
        y = m.norm(x)
        return m.first(y) * m.second(y)

    members = {"first": nn.Linear(4, 5), "second": nn.Linear(4, 5, bias=False)}
    model, x = net(function, norm=nn.BatchNorm1d(4), **members), torch.randn(3, 4)
    graph = prepare(export(model, x), (x,))
    assert operations(graph) == {"linear": 2, "mul": 1}
    check_same(model, graph, x)


def test_behind_a_concatenation(net, export, operations, image):
    def function(m, x):
        return m.norm(torch.cat([m.conv(x), x], 1)).relu()

    model = net(function, conv=nn.Conv2d(4, 6, 3, padding=1), norm=nn.BatchNorm2d(10))
    graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 2, "cat": 1, "relu": 1}
    assert {n for n, _ in graph.named_parameters()} == {
        *("conv.weight", "conv.bias", "norm.weight", "norm.bias")
    }
    check_same(model, graph, image)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [(nn.BatchNorm1d(4), (3, 4)), (nn.BatchNorm1d(4, affine=False), (3, 4, 5))],
)
def test_alone(net, export, operations, norm, shape):
    model, x = net(lambda m, x: m.norm(x.tanh()), norm=norm), torch.randn(shape)
    graph = prepare(export(model, x), (x,))
    assert operations(graph)["conv1d"] == 1
    assert "batch_norm" not in operations(graph)
    check_same(model, graph, x)


def test_statistics_of_the_batch_are_left(net, export, operations, image, caplog):
    model = net(
        lambda m, x: F.batch_norm(m.conv(x), None, None, training=True), conv=nn.Conv2d(4, 6, 3)
    )
    with caplog.at_level("INFO"):
        graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 1, "batch_norm": 1}
    assert "batch_norm is left as it is: it computes statistics of the batch" in caplog.text


def test_folded_weights_are_trained(net, export, image):
    model = net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    graph = prepare(export(model, image), (image,))
    graph(image).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in graph.parameters())


def test_a_dynamic_batch_size_stays_dynamic(net, export, image):
    model = net(
        lambda m, x: m.norm(m.conv(m.alone(x))),
        **{"alone": nn.BatchNorm2d(4), "conv": nn.Conv2d(4, 6, 3, padding=1)},
        norm=nn.BatchNorm2d(6),
    )
    shapes = ({0: torch.export.Dim("batch")},)
    graph = prepare(export(model, image, dynamic_shapes=shapes), (image,))
    check_same(model, graph, torch.randn(5, 4, 6, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type(net, export, operations, image, dtype):
    model = net(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
    model, image = model.to(dtype), image.to(dtype)
    graph = prepare(export(model, image), (image,))
    assert operations(graph) == {"conv2d": 1}
    assert {p.dtype for p in graph.parameters()} == {dtype}
    torch.testing.assert_close(graph(image), model(image), rtol=0.1, atol=0.1)
