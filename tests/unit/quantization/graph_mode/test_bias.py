from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import GPTQConfig
from quark.torch.training import follow_ranges, freeze_ranges
from tests.unit.quantization.graph_mode.networks import (
    CHANNELS,
    EVERYTHING,
    INT8,
    INT32,
    export,
    graph_config,
)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2)
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        y = self.up(self.conv(x).relu())
        return self.fc(self.fc(y) * 3)


def quantize(algorithm=None, **changes):
    data = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))]
    graph = export(Layers().eval(), *data)
    config = graph_config(replace(EVERYTHING, bias=INT32, **changes), algo_config=algorithm)
    return ModelQuantizer(config).quantize_model(graph, data)


@pytest.mark.parametrize("weight", [INT8, CHANNELS], ids=["tensor", "channel"])
@pytest.mark.parametrize("algorithm", [None, GPTQConfig()], ids=["nearest", "gptq"])
def test_an_int32_bias_has_the_scale_of_weight_times_input(weight, algorithm):
    graph = quantize(algorithm, weight=weight)
    conv = graph.conv
    expected = conv.weight_quantizer.scale * graph.edge_quantizers.x.scale
    assert torch.equal(conv.bias_quantizer.scale, expected)
    assert expected.shape == (() if weight is INT8 else (4,))
    state = ModelQuantizer.freeze(graph).conv.quantized_tensor("bias")
    assert state.codes.dtype == torch.int32 and state.codes.abs().max() > 1000
    assert torch.allclose(state.codes * expected.double(), Layers().conv.bias.double(), atol=1e-4)


def test_scales_of_inputs_are_not_those_of_biases():
    """The first axis of the weight of a transposed convolution is that of its inputs."""
    data = [torch.randn(1, 4, 5, 5)]
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 2)).eval()
    for axis in (0, 1):
        weight = replace(CHANNELS, ch_axis=axis)
        config = graph_config(replace(EVERYTHING, bias=INT32, weight=weight))
        graph = ModelQuantizer(config).quantize_model(export(model, *data), data)
        scale = graph.get_submodule("0").bias_quantizer.scale
        assert scale.shape == ((4,) if axis else ())


def test_a_layer_that_runs_twice_takes_the_smallest_scale():
    graph = quantize()
    edges = graph.edge_quantizers
    factor = graph.fc.bias_quantizer.scale / graph.fc.weight_quantizer.scale
    assert factor == min(edges.up.scale, edges.mul.scale)


def test_other_biases_keep_their_own_scale():
    graph = quantize(input_tensors=None, output_tensors=None)
    largest = Layers().conv.bias.abs().max()
    assert graph.conv.bias_quantizer.scale == 2**-23  # the smallest scale
    data = [torch.randn(2, 3, 6, 6)]
    config = graph_config(replace(EVERYTHING, bias=INT8))
    other = ModelQuantizer(config).quantize_model(export(Layers().eval(), *data), data)
    assert torch.allclose(other.conv.bias_quantizer.scale, largest / 127.5)


@pytest.mark.parametrize("weight", [INT8, CHANNELS], ids=["tensor", "channel"])
@pytest.mark.parametrize("changes", [(), (freeze_ranges,), (freeze_ranges, follow_ranges)])
def test_int32_biases_train_under_the_scale_of_products(weight, changes):
    graph = quantize(weight=weight).train()
    x, layer = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1)), graph.conv
    scale, before = layer.bias_quantizer.scale.clone(), layer.bias.detach().clone()
    optimizer = torch.optim.SGD(graph.parameters(), 0.1)
    for change in (None, *changes):
        if change is not None:
            change(graph)
        optimizer.zero_grad()
        graph(x).square().mean().backward()
        assert (layer.bias.grad != 0).all()
        optimizer.step()
        assert torch.equal(layer.bias_quantizer.scale, scale)
    trained = layer.bias.detach().clone()
    assert (trained != before).all()
    frozen = ModelQuantizer.freeze(graph.eval())
    product = layer.weight_quantizer.scale * frozen.edge_quantizers.x.scale
    assert torch.equal(layer.bias_quantizer.scale, product)
    assert ((layer.bias - trained).abs() <= product / 2 * 1.001).all()
