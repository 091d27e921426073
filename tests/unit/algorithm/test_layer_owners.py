"""Layers are dealt out by cost, and every process gets all results and messages."""

import logging

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
    assert layer_owners._deal([5, 9, 2, 4, 4], 2) == [1, 0, 1, 1, 0]
    assert layer_owners._deal([1, 1], 3) == [0, 1]
    assert layer_owners._deal([3, 2, 1], 1) == [0, 0, 0]


def changed(widths):
    """Change the layers of a model, each in one process; return them and who changed which."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, 4) for width in widths))
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
    expected, order, frozen = changed([4, 8, 6])
    assert order == ["0", "1", "2"] and frozen == [True] * 3
    for state, mine, frozen in (results := run(2, lambda: changed([4, 8, 6]))):
        assert frozen == [True] * 3 and state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert mine in (["0"], ["1", "2"])
    assert [mine for _, mine, _ in results] == [["1", "2"], ["0"]]  # larger layers cost more
