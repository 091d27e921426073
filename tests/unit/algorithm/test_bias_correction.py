"""Bias correction: outputs of each layer have the mean of the float layer."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import (
    AWQConfig,
    BiasCorrectionConfig,
    Config,
    GPTQConfig,
    Int4PerTensorSpec,
    QuantizationConfig,
)

INT4 = Int4PerTensorSpec(
    observer_method="min_max",
    symmetric=True,
    scale_type="float",
    round_method="half_even",
    is_dynamic=False,
).to_quantization_spec()
CORRECTION = BiasCorrectionConfig()


def quantize(model, data, *algorithms, inputs=None):
    layer = QuantizationConfig(weight=INT4, input_tensors=inputs)
    config = Config(layer, algo_config=list(algorithms))
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))


def channel_means(y, axis):
    return y.detach().movedim(axis, 0).flatten(1).mean(1)


LAYERS = {
    "linear": (nn.Linear(6, 5), (3, 7, 6), -1),
    "convolution": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 9, 9), 1),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (3, 4, 8, 8), 1),
    "reflecting": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (3, 4, 8, 8), 1),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (3, 4, 5, 5), 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_means_of_outputs_are_those_of_the_float_layer(name):
    layer, shape, axis = LAYERS[name]
    model = nn.Sequential(deepcopy(layer)).eval()
    data = [torch.rand(shape), torch.rand(shape) + 1]
    x = torch.cat(data)
    expected, weight = channel_means(model(x), axis), model[0].weight.clone()
    plain = channel_means(quantize(deepcopy(model), data)(x), axis)
    corrected = quantize(model, data, CORRECTION)
    assert not torch.equal(corrected[0].weight, weight)
    assert (plain - expected).abs().max() > 1e-3
    torch.testing.assert_close(channel_means(corrected(x), axis), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "convolution"])
def test_the_mean_of_rounded_inputs_counts_too(name):
    """Small positive values round to zero, so the mean of the outputs moves with them."""
    layer, shape, axis = LAYERS[name]
    model = nn.Sequential(deepcopy(layer)).eval()
    torch.manual_seed(0)
    model[0].reset_parameters()
    x = torch.rand(shape) ** 4
    expected = channel_means(model(x), axis)
    inputs = replace(INT4, is_dynamic=True)
    plain, corrected = (
        quantize(deepcopy(model), [x], *algorithms, inputs=inputs)
        for algorithms in ((), (CORRECTION,))
    )
    assert (channel_means(plain(x), axis) - expected).abs().max() > 1e-3
    torch.testing.assert_close(channel_means(corrected(x), axis), expected, rtol=0, atol=1e-5)


def test_a_net_comes_closer_to_its_float_function():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16), nn.ReLU()]
    head = [nn.Conv2d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    model = nn.Sequential(*layers, *head).eval()
    data, held_out = [torch.rand(8, 3, 10, 10) for _ in range(4)], torch.rand(8, 3, 10, 10)
    exact = model(held_out)
    plain = (quantize(deepcopy(model), data)(held_out) - exact).norm()
    corrected = (quantize(deepcopy(model), data, CORRECTION)(held_out) - exact).norm()
    assert corrected < 0.5 * plain


def test_batches_do_not_matter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.rand(8, 3, 8, 8)
    cuts = [[x], list(x.split(3)), list(x.split(1))]
    biases = [quantize(deepcopy(model), cut, CORRECTION)[2].bias for cut in cuts]
    assert torch.equal(biases[0], biases[1])
    assert torch.equal(biases[0], biases[2])


def test_layers_without_a_bias_are_named(caplog):
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4)).eval()
    with caplog.at_level("INFO"):
        quantize(model, [torch.rand(3, 6)], CORRECTION)
    assert "Not corrected, since there is no bias: 0." in caplog.text
    assert model[0].bias is None


def test_no_bias_at_all_is_an_error():
    model = nn.Sequential(nn.Linear(6, 5, bias=False)).eval()
    weight = model[0].weight.clone()
    with pytest.raises(ValueError, match="bias_correction: no layer with a quantized weight"):
        quantize(model, [torch.rand(3, 6)], CORRECTION)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize(
    ("algorithms", "why"),
    [
        ([GPTQConfig(), CORRECTION], "bias_correction follows gptq, .* Leave bias_correction out"),
        ([CORRECTION, GPTQConfig()], "gptq follows bias_correction, .* Leave bias_correction out"),
        ([CORRECTION, AWQConfig()], "awq follows bias_correction, .* Put bias_correction last"),
    ],
    ids=["after rounding", "before rounding", "before rescaling"],
)
def test_it_comes_last_and_without_rounding(algorithms, why):
    """Biases that fit other weights than the final ones would make the error larger."""
    model = nn.Sequential(nn.Linear(6, 5)).eval()
    with pytest.raises(ValueError, match=why):
        quantize(model, [torch.rand(3, 6)], *algorithms)
