"""Means over space, and large windows."""

import pytest
import torch
import torch.nn.functional as F

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.preparation import prepare


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: x.mean((2, 3)), (2, 4, 6, 6)),
        (lambda m, x: x.mean((-1, -2), keepdim=True), (2, 4, 6, 5)),
        (lambda m, x: x.mean(3).mean(2), (2, 4, 6, 5)),
        (lambda m, x: x.mean(2).mean(-1), (2, 4, 6, 5)),
        (lambda m, x: x.mean((2, 3, 4)), (2, 4, 3, 3, 3)),
    ],
)
def test_means_over_space(net, export, operations, function, shape):
    model, x = net(function), torch.randn(shape)
    graph = prepare(export(model, x), x)
    assert "mean" not in operations(graph)
    assert operations(graph)[f"adaptive_avg_pool{len(shape) - 2}d"] == 1
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda m, x: x.mean((1, 2)), (2, 4, 6, 6)),
        (lambda m, x: x.mean(-1), (2, 4, 6, 6)),
        (lambda m, x: x.mean(1), (2, 5, 8)),
        (lambda m, x: x.mean(), (2, 4, 6, 6)),
    ],
)
def test_other_means_stay(net, export, operations, function, shape):
    x = torch.randn(shape)
    assert operations(prepare(export(net(function), x), x)) == {"mean": 1}


@pytest.mark.parametrize(
    ("function", "size", "limit", "windows"),
    [
        (lambda m, x: F.adaptive_avg_pool2d(x, 1), (14, 14), 64, [(7, 7), (2, 2)]),
        (lambda m, x: F.avg_pool2d(x, (12, 4)), (26, 9), 16, [(4, 4), (3, 1)]),
        (lambda m, x: F.max_pool2d(x, 12), (24, 25), 16, [(4, 4), (3, 3)]),
        (lambda m, x: x.mean((2, 3)), (8, 16), 64, [(8, 8), (1, 2)]),
        (lambda m, x: F.adaptive_avg_pool2d(x, (2, 1)), (20, 14), 32, [(2, 14), (5, 1)]),
    ],
)
def test_large_windows_are_split(net, export, function, size, limit, windows):
    model, x = net(function), torch.randn(2, 3, *size)
    graph = prepare(export(model, x), x, PassOptions(largest_pool=limit))
    pools = [n for n in graph.graph.nodes if "pool2d" in str(n.target)]
    assert [tuple(n.args[1]) for n in pools] == windows
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: F.avg_pool2d(x, 12, 3), "overlap"),
        (lambda m, x: F.avg_pool2d(x, 12, padding=2), "reach beyond"),
        (lambda m, x: F.adaptive_avg_pool2d(x, 5), "not all of one size"),
        (lambda m, x: F.avg_pool2d(x, (23, 1)), "no divisors"),
    ],
)
def test_windows_that_cannot_be_split_are_named(net, export, operations, caplog, function, reason):
    model, x = net(function), torch.randn(2, 3, 23, 24)
    with caplog.at_level("INFO"):
        graph = prepare(export(model, x), x, PassOptions(largest_pool=16))
    assert sum(operations(graph).values()) == 1
    assert reason in caplog.text


def test_the_limit_is_checked():
    with pytest.raises(ValueError, match=r"largest_pool must be at least 2.*got 1"):
        PassOptions(largest_pool=1)
