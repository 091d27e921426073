"""Cross-layer equalization: ranges of channels are equal, and the float function is the same."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from quark.torch.algorithm.cle import equalizing_factors
from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import (
    CLEConfig,
    Config,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
)

PER_TENSOR = Int8PerTensorSpec(
    observer_method="min_max",
    symmetric=True,
    scale_type="float",
    round_method="half_even",
    is_dynamic=False,
).to_quantization_spec()


@pytest.fixture
def image():
    return torch.randn(4, 3, 8, 8)


@pytest.fixture
def net():
    """Two convolutions around a depthwise one, with channels of very different ranges."""
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU()),
        *(nn.Conv2d(8, 6, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    ).eval()
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            spread = torch.exp2(torch.linspace(-4, 4, layer.out_channels))
            layer.weight *= spread[torch.randperm(len(spread))].view(-1, 1, 1, 1)
    return model


def quantize(model, data, *algorithms, spec=PER_TENSOR):
    config = Config(QuantizationConfig(weight=spec), algo_config=list(algorithms))
    return ModelQuantizer(config).quantize_model(model, [data])


def rows(weight, axis):
    return weight.detach().movedim(axis, 0).flatten(1).abs().amax(1)


def test_factors_give_both_sides_the_same_range():
    producer, consumers = torch.tensor([4.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 4.0, 2.0, 0.0])
    factors = equalizing_factors(producer, consumers)
    assert factors.tolist() == [2.0, 0.5, 1.0, 1.0]
    torch.testing.assert_close((producer / factors)[:2], (consumers * factors)[:2])


def test_ranges_are_equal_along_a_chain(net, image):
    quantize(net, image, CLEConfig())
    first, middle, last, head = net[0], net[2], net[4], net[8]
    for producer, consumer in (
        (rows(first.weight, 0), rows(middle.weight, 0)),
        (rows(middle.weight, 0), rows(last.weight, 1)),
        (rows(last.weight, 0), rows(head.weight, 1)),
    ):
        torch.testing.assert_close(producer, consumer, rtol=1e-2, atol=0)


def test_the_float_function_is_the_same(net, image):
    before = net(image)
    weights = [p.clone() for p in net.parameters()]
    quantize(net, image, CLEConfig())
    for module in net.modules():
        if hasattr(module, "to_float"):
            module.to_float()
    assert not torch.equal(net[2].weight, weights[2])
    torch.testing.assert_close(net(image), before, rtol=1e-4, atol=1e-4)


def test_the_error_is_smaller(net, image):
    exact, errors = net(image), []
    for algorithms in ((), (CLEConfig(),)):
        model = ModelQuantizer.freeze(quantize(deepcopy(net), image, *algorithms))
        errors.append((model(image) - exact).detach().norm())
    assert errors[1] < 0.5 * errors[0]


def test_a_fixed_cap_is_left_and_named(net, image, caplog):
    net[1] = nn.ReLU6()
    weight = net[0].weight.clone()
    with caplog.at_level("INFO"):
        quantize(net, image, CLEConfig())
    assert torch.equal(net[0].weight, weight)
    assert "0 is not equalized: it goes through hardtanh in 1." in caplog.text


def test_nothing_to_equalize_is_an_error(image):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).eval()
    with pytest.raises(ValueError, match=r"cle: no quantized layer .* Fold batch norms first"):
        quantize(model, image, CLEConfig())


def test_a_scale_for_each_channel_is_warned_of(net, image, caplog):
    spec = Int8PerChannelSpec(
        symmetric=True, scale_type="float", round_method="half_even", ch_axis=0, is_dynamic=False
    ).to_quantization_spec()
    quantize(net, image, CLEConfig(), spec=spec)
    assert "cle: no weight has one scale for the whole tensor" in caplog.text


def test_options_are_checked():
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        CLEConfig(iterations=0)
