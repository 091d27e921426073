"""Layers are dealt out by cost, and every process gets all results and messages."""

import logging
from copy import deepcopy

import pytest
import torch
from torch import nn

from quark.torch.algorithm import layer_owners
from quark.torch.algorithm.layer_owners import change_layers
from quark.torch.algorithm.layers import freeze
from quark.torch.pipeline.processes import processes
from quark.torch.quantization.preparation import quantized_layers, replace_layers, select_layers
from tests.configurations import config, spec
from tests.unit.pipeline.threads import run


def test_the_costliest_first():
    def deal(costs, count):
        return [owner for [owner] in layer_owners._deal([[c] for c in costs], [0] * 9, count)]

    assert deal([5, 9, 2, 4, 4], 2) == [1, 0, 1, 1, 0]
    assert deal([1, 1], 3) == [0, 1]
    assert deal([3, 2, 1], 1) == [0, 0, 0]


@pytest.mark.parametrize(
    ("costs", "extras", "expected", "loads"),
    [
        ([[4, 4], [5]], [1, 2], [[1, 1], [0]], [7, 9]),  # to divide the first would cost 12 and 5
        ([[4, 4], [5]], [1, 0], [[1, 1], [0]], [5, 9]),
        ([[6, 6]], [1], [[0, 1]], [7, 7]),  # both factor
        ([[1, 1, 1, 1], [3]], [0, 0], [[1, 1, 1, 0], [0]], [4, 3]),
    ],
)
def test_a_group_is_divided_where_that_is_faster(costs, extras, expected, loads):
    owners = layer_owners._deal(costs, extras, 2)
    assert owners == expected
    sums = [0, 0]
    for members, numbers, extra in zip(costs, owners, extras, strict=True):
        for number in set(numbers):
            own = [c for c, n in zip(members, numbers, strict=True) if n == number]
            sums[number] += sum(own) + extra
    assert sums == loads


def changed(model):
    """Change the layers of a copy, each in one process; return them and who changed which."""
    model = deepcopy(model)
    settings = config(spec("int8", "per_channel", True), exclude=())
    replace_layers(model, select_layers(model, settings))
    layers, mine = dict(quantized_layers(model)), []

    def change(names):
        for name in names:
            mine.append(name)
            logging.getLogger("quark").warning("%s by %d", name, processes().rank)
            layer = layers[name]
            layer.weight_quantizer.observer(layer.weight)
            layer.weight_quantizer.compute_scales(layer.weight)
            with torch.no_grad():
                layer.weight.copy_(layer.weight_quantizer.freeze_(layer.weight.clone()))
            freeze(layer)

    change_layers(layers, [["0"], ["1", "2"]], change)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    return state, mine, [layer.frozen for layer in layers.values()]


def test_every_process_has_all_results(caplog):
    torch.manual_seed(0)  # not in the threads: they share the generator
    model = nn.Sequential(*(nn.Linear(width, 4) for width in (4, 8, 6)))
    expected, order, frozen = changed(model)
    assert order == ["0", "1", "2"] and frozen == [True] * 3
    for state, _, frozen in (results := run(2, lambda: changed(model))):
        assert frozen == [True] * 3 and state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert [mine for _, mine, _ in results] == [["1"], ["0", "2"]]  # the largest first
