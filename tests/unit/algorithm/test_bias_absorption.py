"""Bias absorption: what all outputs of a channel have in common moves into the next layer."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from quark.torch.quantization.api import ModelQuantizer
from quark.torch.quantization.config.config import CLEConfig, Config, QuantizationConfig
from tests.unit.quantization.graph_mode.networks import INT8, UINT8, export, graph_config

ABSORBED, PLAIN = CLEConfig(absorb_biases=True), CLEConfig()
HIGH = torch.tensor([0.0, 30.0, 0.0, 12.0, 50.0, 0.0])  # added to biases of channels
POSITIVE = HIGH > 0


def make_net(last=None, factor=1):
    """Two convolutions around an activation, with channels that are always positive."""
    torch.manual_seed(3)
    net = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1) if last is None else last),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    ).eval()
    with torch.no_grad():
        net[0].bias += factor * HIGH
    return net


@pytest.fixture
def data():
    torch.manual_seed(0)
    return [torch.randn(4, 3, 8, 8) for _ in range(3)]


def float_net(net, data, algorithm):
    """The float network after an algorithm."""
    config = Config(QuantizationConfig(weight=INT8), algo_config=[algorithm])
    changed = ModelQuantizer(config).quantize_model(deepcopy(net), data)
    for module in list(changed.modules()):
        if hasattr(module, "to_float"):
            module.to_float()
    return changed


@torch.no_grad()
def test_smallest_outputs_become_zero_and_the_function_stays(data):
    net, x = make_net()[:3], torch.cat(data)
    before, after = (float_net(net, data, a) for a in (PLAIN, ABSORBED))
    old, new = before[0](x).amin((0, 2, 3)), after[0](x).amin((0, 2, 3))
    assert bool((old[POSITIVE] > 1).all())
    torch.testing.assert_close(new[POSITIVE], torch.zeros(3), rtol=0, atol=1e-4)
    assert torch.equal(new[~POSITIVE], old[~POSITIVE])
    moved = before[0].bias - after[0].bias
    torch.testing.assert_close(
        after[2].bias, before[2].bias + before[2].weight[:, :, 0, 0] @ moved, rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(after(x), net(x), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_the_error_of_the_graph_is_smaller(data):
    net, x = make_net(factor=4), torch.randn(8, 3, 8, 8)
    layer = QuantizationConfig(UINT8, UINT8, INT8)
    exact, errors = net(x), []
    for algorithm in (PLAIN, ABSORBED):
        config = graph_config(layer, algo_config=[algorithm])
        graph = export(net, data[0], dynamic_shapes=({0: torch.export.Dim("batch")},))
        model = ModelQuantizer(config).quantize_model(graph, data)
        errors.append(float((ModelQuantizer.freeze(model.eval())(x) - exact).norm()))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("last", "holds"),
    [
        (nn.Conv2d(6, 4, 3, padding=1), False),
        (nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), True),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), False),
        (nn.Conv2d(6, 6, 3, groups=6), True),
        (nn.ConvTranspose2d(6, 4, 1), True),
        (nn.ConvTranspose2d(6, 4, 2, 2), False),  # each position has a weight of its own
    ],
    ids=["padded", "reflected", "depthwise padded", "depthwise", "transposed", "stride"],
)
@torch.no_grad()
def test_layers_behind(data, caplog, last, holds):
    net, x = make_net(last), torch.cat(data)
    net[5] = nn.Linear(last.out_channels, 3)
    before = float_net(net, data, PLAIN)
    with caplog.at_level("INFO"):
        after = float_net(net, data, ABSORBED)
    assert ("The bias of 0 is not absorbed: outputs of 2 would change" in caplog.text) != holds
    assert ("0: the biases of 3 channels are absorbed." in caplog.text) == holds
    assert torch.equal(after[0].bias, before[0].bias) != holds
    torch.testing.assert_close(after(x), net(x), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_caps_become_lower(data):
    """ReLU6, which has a cap for each channel in the graph."""
    net = make_net()
    net[1] = nn.ReLU6()
    net[0].bias -= 0.9 * HIGH  # between 0 and 6, or above 6
    caps, biases = [], []
    for algorithm in (PLAIN, ABSORBED):
        config = graph_config(QuantizationConfig(weight=INT8), algo_config=[algorithm])
        graph = ModelQuantizer(config).quantize_model(export(net, data[0]), data)
        caps.append(next(p for n, p in graph.named_parameters() if n.endswith(".cap")))
        biases.append(graph.get_submodule("0").bias)
        for name in ("0", "2", "5"):
            graph.get_submodule(name).weight_quantizer.enabled = False
        torch.testing.assert_close(graph(data[1]), net(data[1]), rtol=1e-5, atol=1e-4)
    lower = caps[0] - caps[1]
    torch.testing.assert_close(lower, biases[0] - biases[1])
    assert bool((lower > 0.1).any()) and bool((caps[1] >= 0).all())


def test_the_order_of_samples_does_not_matter(data):
    x, net = torch.cat(data), make_net()
    first, *others = (
        float_net(net, cut, ABSORBED)[0].bias for cut in (list(x.split(4)), [x], list(x.split(5)))
    )
    assert all(torch.equal(first, bias) for bias in others)


def test_a_net_without_high_biases_is_left(data, caplog):
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).eval()
    before = float_net(net, data, PLAIN)
    with caplog.at_level("INFO"):
        after = float_net(net, data, ABSORBED)
    assert "No bias is absorbed" in caplog.text
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    )


def test_a_layer_without_a_bias_is_left(data):
    net = make_net(nn.Conv2d(6, 4, 1, bias=False))
    before, after = (float_net(net, data, a) for a in (PLAIN, ABSORBED))
    assert after[2].bias is None and torch.equal(after[0].bias, before[0].bias)


def test_data_is_needed():
    config = Config(QuantizationConfig(weight=INT8), algo_config=[ABSORBED])
    with pytest.raises(ValueError, match="Algorithms need calibration data"):
        ModelQuantizer(config).quantize_model(make_net())
