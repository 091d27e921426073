"""Values that do not depend on the inputs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from quark.torch.quantization.graph_mode.passes.preparation import prepare


def test_buffers_and_numbers_become_a_buffer(net, export, operations, image):
    def function(m, x):
        return x + (m.table * 2 + torch.arange(6)).exp() * torch.ones(6)

    model = net(function)
    model.register_buffer("table", torch.linspace(-1, 0, 6))
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"add": 1}
    assert list(graph.parameters()) == []
    [(_, value)] = graph.named_buffers()
    assert value.shape == (6,)
    torch.testing.assert_close(graph(image), model(image))


def test_parameters_stay_trainable(net, export, operations, image):
    model = net(lambda m, x: x + m.scale.exp(), scale=nn.Parameter(torch.zeros(6)))
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"exp": 1, "add": 1}
    assert [n for n, _ in graph.named_parameters()] == ["scale"]


def test_the_weight_of_a_normalized_layer_is_a_parameter(net, export, operations, image):
    conv = parametrizations.weight_norm(nn.Conv2d(4, 6, 3))
    model = net(lambda m, x: m.norm(m.conv(x)), conv=conv, norm=nn.BatchNorm2d(6))
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"conv2d": 1}
    assert {n for n, _ in graph.named_parameters()} == {"conv.weight", "conv.bias"}
    assert all(p.requires_grad for p in graph.parameters())
    torch.testing.assert_close(graph(image), model(image), rtol=1e-4, atol=1e-4)


def test_any_parametrization(net, export, operations):
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    model, x = net(lambda m, x: m.linear(x), linear=linear), torch.randn(3, 4)
    graph = prepare(export(model, x), x)
    assert operations(graph) == {"linear": 1}
    assert torch.equal(graph.linear.weight, model.linear.weight)
    assert isinstance(graph.linear.weight, nn.Parameter)


def test_random_numbers_stay_random(net, export, operations, image):
    model = net(lambda m, x: m.conv(x) + 0 * torch.rand(1), conv=nn.Conv2d(4, 4, 3))
    assert operations(prepare(export(model, image), image))["rand"] == 1


def test_a_constant_that_is_written_to_is_made_in_each_run(net, export, image):
    def function(m, x):
        y = torch.zeros(2, 4, 6, 6)
        y[:, :2] += x[:, :2]
        return y

    model = net(function)
    graph = prepare(export(model, image), image)
    for _ in range(2):
        torch.testing.assert_close(graph(image), model(image))


def test_large_constants_are_not_stored(net, export, operations, caplog):
    model = net(lambda m, x: F.relu(x) + torch.zeros(600, 600))
    x = torch.randn(600, 600)
    with caplog.at_level("INFO"):
        graph = prepare(export(model, x), x)
    assert operations(graph) == {"relu": 1, "zeros": 1, "add": 1}
    assert "zeros is left as it is: it would take 1 MiB" in caplog.text
