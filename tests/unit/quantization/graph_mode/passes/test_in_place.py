"""In-place operations become operations that return a tensor where nobody else sees the write."""

import pytest
import torch
from torch import nn

from quark.torch.quantization.graph_mode.passes.preparation import prepare


def check(net, export, operations, image, function, expected, **members):
    model = net(function, **members)
    graph = prepare(export(model, image.clone()), image)
    assert operations(graph) == expected
    for _ in range(2):  # a write to a constant would show in the second run
        torch.testing.assert_close(graph(image.clone()), model(image.clone()))


def test_activations(net, export, operations, image):
    check(
        *(net, export, operations, image),
        lambda m, x: m.act(m.conv(x).add_(1)),
        {"conv2d": 1, "add": 1, "relu": 1},
        conv=nn.Conv2d(4, 4, 3),
        act=nn.ReLU(inplace=True),
    )


def test_later_readers_see_the_new_value(net, export, operations, image):
    def function(m, x):
        y = m.conv(x)
        early = y * 2
        y.relu_()
        return early + y

    expected = {"conv2d": 1, "mul": 1, "relu": 1, "add": 1}
    check(net, export, operations, image, function, expected, conv=nn.Conv2d(4, 4, 3))


def test_a_view_that_is_read_later_keeps_the_write(net, export, operations, image, caplog):
    def function(m, x):
        y = m.conv(x)
        y[:, :2].mul_(3)
        return y.relu()

    expected = {"conv2d": 1, "slice": 1, "mul_": 1, "relu": 1}
    with caplog.at_level("INFO"):
        check(net, export, operations, image, function, expected, conv=nn.Conv2d(4, 4, 3))
    assert "mul_ is left as it is: conv2d shares the memory, and is read later" in caplog.text


@pytest.mark.parametrize("inplace", [True, False])
def test_a_batch_norm_before_an_activation(net, export, operations, image, inplace):
    def function(m, x):
        return m.act(m.norm(m.conv(x)))

    members = {"conv": nn.Conv2d(4, 4, 3), "norm": nn.BatchNorm2d(4)}
    expected = {"conv2d": 1, "hardtanh": 1}
    check(*(net, export, operations, image, function, expected), act=nn.ReLU6(inplace), **members)


def test_writes_to_inputs_stay(net, export, image):
    model = net(lambda m, x: x.relu_() + 1)
    graph = prepare(export(model, image.clone()), image)
    given = image.clone()
    graph(given)
    assert torch.equal(given, image.relu())


def test_a_type_that_would_be_promoted_stays(net, export, operations):
    """A half-precision tensor stays one if a wider tensor is added in place."""
    model = net(lambda m, x: x.half().mul(2).add_(x))
    x = torch.randn(3, 4)
    graph = prepare(export(model, x), x)
    assert operations(graph)["add_"] == 1
    assert graph(x).dtype == torch.float16
