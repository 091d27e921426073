"""Cross-layer equalization of graphs: batch norms are folded first, and ReLU6 gets caps."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    BiasCorrectionConfig,
    CLEConfig,
    QuantizationConfig,
)
from tests.unit.quantization.graph_mode.networks import INT8, export, graph_config

ALGORITHMS = {
    "plain": [],
    "cle": [CLEConfig()],
    "cle and bias correction": [CLEConfig(), BiasCorrectionConfig()],
}


@pytest.fixture
def net():
    """An inverted residual with ReLU6, whose depthwise channels have very different ranges."""
    torch.manual_seed(0)
    layers = (
        *(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
        *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU6()),
        *(nn.Conv2d(16, 4, 1), nn.BatchNorm2d(4)),
    )
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.running_var.uniform_(0.5, 2)
            norm.weight.copy_(torch.exp2(torch.linspace(-5, 3, 16)[torch.randperm(16)]))
    return model


@torch.no_grad()
def error(net, x, name, data):
    config = graph_config(QuantizationConfig(weight=INT8), algo_config=ALGORITHMS[name])
    graph = ModelQuantizer(config).quantize_model(export(net, x), data)
    expected = net(x)
    return float((ModelQuantizer.freeze(graph)(x) - expected).norm() / expected.norm())


def test_errors_become_smaller(net):
    x = 4 * torch.randn(4, 3, 8, 8)
    assert (net[:3](x) == 6).any()  # the caps act
    errors = {name: error(net, x, name, [x]) for name in ALGORITHMS}
    assert errors["cle"] < 0.5 * errors["plain"]
    assert errors["cle and bias correction"] < errors["cle"]


def test_no_data_is_needed(net):
    x = 4 * torch.randn(4, 3, 8, 8)
    assert error(net, x, "cle", None) == error(net, x, "cle", [x])
