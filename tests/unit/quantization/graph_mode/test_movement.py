import operator

import pytest
import torch
import torch.nn.functional as F

from quark.torch.quantization.graph_mode.float_graph import independent_copy
from quark.torch.quantization.graph_mode.movement import find_movements
from tests.unit.quantization.graph_mode.networks import export
from tests.unit.quantization.graph_mode.test_float_graph import Wrapped

MOVES = {
    "reshape": lambda self, x: x.reshape(2, 4, 6, 6),
    "permute": lambda self, x: x.permute(0, 2, 3, 1),
    "slice": lambda self, x: x[:, 1:, ::2],
    "split": lambda self, x: x.split(2, 1)[1],
    "cat": lambda self, x: torch.cat([x, x.flip(1)], 1),
    "pad": lambda self, x: F.pad(x, (1, 1, 0, 2)),
    "max_pool2d": lambda self, x: F.max_pool2d(x, 3, 2, 1),
    "relu": lambda self, x: x.relu(),
    "pixel_shuffle": lambda self, x: F.pixel_shuffle(x, 2),
    "upsample_nearest2d": lambda self, x: F.interpolate(x, scale_factor=2),
    "roll": lambda self, x: x.roll(1, -1),
    "expand": lambda self, x: x[:, None].expand(-1, 3, -1, -1, -1),
    "dropout": lambda self, x: F.dropout(x, 0.5, False),
    "maximum": lambda self, x: torch.maximum(x, x.flip(0)),
}
COMPUTES = {
    "avg_pool2d": lambda self, x: F.avg_pool2d(x, 2),
    "relu6": lambda self, x: F.relu6(x),
    "hardtanh": lambda self, x: F.hardtanh(x),
    "clamp": lambda self, x: x.clamp(max=0.1),
    "leaky_relu": lambda self, x: F.leaky_relu(x),
    "gelu": lambda self, x: F.gelu(x),
    "hardswish": lambda self, x: F.hardswish(x),
    "add": lambda self, x: x + x.flip(1),
    "mul": lambda self, x: x * 0.5,
    "neg": lambda self, x: -x,
    "abs": lambda self, x: x.abs(),
    "softmax": lambda self, x: x.softmax(1),
    "upsample_bilinear2d": lambda self, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad with a value": lambda self, x: F.pad(x, (1, 1), value=0.3),
    "half": lambda self, x: x.half(),
    "mean": lambda self, x: x.mean((2, 3)),
    "cumsum": lambda self, x: x.cumsum(1),
}


def movements(function):
    x = torch.randn(2, 4, 6, 6)
    graph = independent_copy(export(Wrapped(function), x))
    moving = find_movements(graph, [x])
    last = next(n for n in graph.graph.nodes if n.op == "output").args[0][0]
    return last.args[0] if last.target is operator.getitem else last, moving


@pytest.mark.parametrize("function", MOVES.values(), ids=MOVES)
def test_operators_that_move_values_are_recognized(function):
    node, moving = movements(function)
    assert node in moving


@pytest.mark.parametrize("function", COMPUTES.values(), ids=COMPUTES)
def test_operators_that_compute_values_are_not(function):
    node, moving = movements(function)
    assert node not in moving


def test_values_of_the_example_do_not_matter():
    """All ones: a product with it would move values."""
    graph = independent_copy(export(Wrapped(lambda self, x: x * (x + 1)), torch.zeros(3)))
    assert find_movements(graph, [torch.zeros(3)]) == set()


@pytest.mark.parametrize(("name", "moves"), [("relu", True), ("relu6", False), ("add", False)])
def test_elementwise_operators_run_on_a_part_of_large_tensors(name, moves, monkeypatch):
    """The slope of relu6 shows in any part; a max pool sees the whole tensor."""
    sizes, randint = [], torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: sizes.append(a[1]) or randint(*a, **k))
    function = (MOVES | COMPUTES)[name]
    x = torch.randn(1, 40, 50, 60)
    graph = independent_copy(export(Wrapped(lambda self, x: function(self, x).max()), x))
    moving = find_movements(graph, [x])
    names = {node.name for node in moving}
    assert (name in names) == moves
    assert [1, 32, 32, 32] in [list(size) for size in sizes]
