"""Static scales per channel of inputs and outputs belong to channels, not to samples."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization import Config, Int8PerChannelSpec, QuantizationConfig

TENSORS = ("input_tensors", "output_tensors")


def quantized(layer, tensor, batches, **options):
    spec = Int8PerChannelSpec(symmetric=True, **options).to_quantization_spec()
    config = Config(global_quant_config=QuantizationConfig(**{tensor: spec}))
    return ModelQuantizer(config).quantize_model(nn.Sequential(layer).eval(), batches)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("axis", [-1, 2])
def test_channels_of_a_linear_layer(tensor, axis):
    batches = [torch.randn(2, 6, 8), torch.randn(3, 5, 8)]
    model = quantized(nn.Linear(8, 8), tensor, batches, ch_axis=axis)
    assert model[0].quantizers()[tensor].scale.shape == (8,)
    assert model(torch.randn(4, 7, 8)).shape == (4, 7, 8)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("axis", [1, -3])
def test_channels_of_a_convolution(tensor, axis):
    model = quantized(nn.Conv2d(4, 4, 3), tensor, [torch.randn(2, 4, 8, 8)], ch_axis=axis)
    assert model[0].quantizers()[tensor].scale.shape == (4,)
    assert model(torch.randn(1, 4, 9, 9)).shape == (1, 4, 7, 7)


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.Conv2d(4, 4, 3)])
def test_samples_are_refused_before_data_runs(layer, tensor):
    said = rf"^0\.{tensor}: .*ch_axis=0 would belong to the samples .* set is_dynamic=True"
    with pytest.raises(ValueError, match=said):
        quantized(layer, tensor, [None], ch_axis=0)


@pytest.mark.parametrize("tensor", TENSORS)
def test_samples_counted_from_the_end_are_refused_with_the_first_batch(tensor):
    layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=rf"{tensor}: .*ch_axis=-3 would belong to the samples"):
        quantized(layer, tensor, [torch.randn(2, 6, 8)], ch_axis=-3)
    assert type(layer) is nn.Linear


def test_inputs_of_several_lengths_have_no_scales_for_positions():
    batches = [torch.randn(2, 6, 8), torch.randn(2, 5, 8)]
    with pytest.raises(ValueError, match="with 6 and 5 channels along ch_axis=1 have no common"):
        quantized(nn.Linear(8, 8), "input_tensors", batches, ch_axis=1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scales_for_each_token_take_any_axis(axis):
    model = quantized(nn.Linear(8, 8), "input_tensors", None, ch_axis=axis, is_dynamic=True)
    assert model(torch.randn(4, 7, 8)).shape == (4, 7, 8)
