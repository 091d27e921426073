import logging

import pytest
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QuantizationConfig
from quark.torch.quantization.nn.fake_quantized import FakeQuantizedLayer
from tests.unit.quantization.graph_mode.networks import (
    EVERYTHING,
    INT8,
    edges,
    export,
    graph_config,
    images,
    network,
)


@pytest.fixture(scope="module")
def graphs():
    return {name: export(network(name)) for name in ("resnet", "unet", "transformer")}


def quantize(graph, **options):
    return ModelQuantizer(graph_config(**options)).quantize_model(graph, images())


def quantized(graph):
    """Names of the quantized layers, and of the values with a quantizer."""
    layers = [n for n, m in graph.named_modules() if isinstance(m, FakeQuantizedLayer)]
    return set(layers), set(edges(graph))


EXCLUDED = {
    "a layer": (["bottom"], {"bottom"}, set()),
    "layers by pattern": (["*o*"], {"bottom", "down", "out"}, {"out", "x"}),
    "an operator by its node": (["add", "cat"], set(), {"add"}),
}


@pytest.mark.parametrize(("exclude", "layers", "values"), EXCLUDED.values(), ids=EXCLUDED)
def test_layers_and_operators_are_excluded_by_name(graphs, exclude, layers, values):
    before, after = (quantized(quantize(graphs["unet"], exclude=e)) for e in ([], exclude))
    assert before[0] - after[0] == layers and values <= before[1] - after[1]


def test_operators_go_by_the_module_that_they_are_part_of(graphs):
    before = quantized(quantize(graphs["resnet"]))[1]
    after = quantized(quantize(graphs["resnet"], exclude=["blocks.1.*"]))[1]
    assert before - after == {"relu_3", "blocks_1_conv2"}


def test_operators_are_chosen_by_the_type_of_their_module(graphs):
    nothing = QuantizationConfig()
    gelu = {"layer_type_quant_config": {nn.GELU: EVERYTHING}}
    only = quantize(graphs["transformer"], layer=QuantizationConfig(weight=INT8), **gelu)
    assert quantized(only)[1] == {"mlp_0", "gelu"}
    others = {"layer_type_quant_config": {nn.GELU: nothing, nn.Linear: nothing}}
    assert quantized(quantize(graphs["transformer"], **others))[0] == {"patches"}


def test_the_first_pattern_counts(graphs):
    weights = QuantizationConfig(weight=INT8)
    for patterns in ({"head": weights, "*": EVERYTHING}, {"*": EVERYTHING, "head": weights}):
        graph = quantize(graphs["resnet"], layer=weights, layer_quant_config=patterns)
        assert ("head" in quantized(graph)[1]) == (next(iter(patterns)) == "*")


def test_patterns_of_nothing_are_reported(graphs, caplog):
    with caplog.at_level(logging.WARNING):
        quantize(graphs["unet"], exclude=["addd", "add", "down"])
    (record,) = (r for r in caplog.records if "exclude" in r.message)
    assert "'addd' matches no module" in record.message and "Nearest: add" in record.message


def test_types_of_nothing_are_reported(graphs, caplog):
    """Layers, operators that are a module of torch, and a type that the graph does not have."""
    kinds = dict.fromkeys([nn.Conv2d, nn.ReLU, nn.LSTM], EVERYTHING)
    with caplog.at_level(logging.WARNING):
        quantize(graphs["resnet"], layer_type_quant_config=kinds)
    (record,) = (r for r in caplog.records if "layer_type_quant_config" in r.message)
    assert "LSTM is the type of no layer or operator of the graph" in record.message


def test_operators_in_float_are_reported(graphs, caplog):
    with caplog.at_level(logging.INFO, logger="quark"):
        quantize(graphs["transformer"])
    (record,) = (r for r in caplog.records if "stay in float" in r.message)
    assert "layer_norm (2), softmax (1)" in record.message


def test_keys_behind_rotary_embeddings_are_refused(graphs):
    with pytest.raises(ValueError, match="kv_cache_post_rope quantizes keys inside of attention"):
        quantize(graphs["unet"], kv_cache_post_rope=True)
