from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import GPTQConfig, Int8PerChannelSpec, QuantizationSpec
from tests.unit.quantization.graph_mode.networks import EVERYTHING, INT8, export, graph_config

INT32 = QuantizationSpec(dtype="int32", qscheme="per_tensor", symmetric=True, is_dynamic=False)
CHANNELS = Int8PerChannelSpec(
    symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False, ch_axis=0
).to_quantization_spec()


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
