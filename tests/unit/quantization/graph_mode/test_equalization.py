"""Cross-layer equalization of graphs: batch norms are folded first, and ReLU6 gets caps."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    AutoSmoothQuantConfig,
    BiasCorrectionConfig,
    CLEConfig,
    OnlineRotationConfig,
    QuantizationConfig,
    RotationConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.torch.quantization.graph_mode.edges import CappedQuantizer
from tests.unit.quantization.graph_mode.networks import INT8, UINT8, export, graph_config

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


def quantize_equalized(net, x):
    """A calibrated graph with quantized activations, and the quantizer after its first caps."""
    config = graph_config(
        QuantizationConfig(weight=INT8, input_tensors=UINT8, output_tensors=UINT8),
        algo_config=[CLEConfig()],
    )
    graph = ModelQuantizer(config).quantize_model(export(net, x), [x]).eval()
    capped = [m for m in graph.modules() if isinstance(m, CappedQuantizer)]
    assert len(capped) == 4  # the values and the caps of two activations
    return graph, capped[0].source


@torch.no_grad()
def test_the_range_of_an_activation_ends_at_its_caps(net):
    x = 4 * torch.randn(4, 3, 8, 8)
    graph, quantizer = quantize_equalized(net, x)
    caps = next(p for n, p in graph.named_parameters() if n.endswith(".cap"))
    before = []  # values that reach the ReLU
    graph.get_submodule("0").register_forward_hook(lambda layer, args, y: before.append(y))
    graph(x)
    after = before[0].relu().minimum(caps.view(-1, 1, 1))
    assert float(after.max()) < 0.9 * float(before[0].max())
    assert float(after.max()) / float(quantizer.scale) == pytest.approx(255, rel=0.01)


@torch.no_grad()
def test_rounding_before_caps_changes_nothing(net):
    x = 4 * torch.randn(4, 3, 8, 8)
    graph, _ = quantize_equalized(net, x)
    expected = graph(x)
    for module in graph.modules():
        if isinstance(module, CappedQuantizer):
            module.train()  # passes values on
    assert torch.equal(graph(x), expected)


def test_the_range_behind_caps_grows_in_training(net):
    x = torch.randn(4, 3, 8, 8)
    graph, quantizer = quantize_equalized(net, x)
    before = float(quantizer.scale)
    graph.train()
    graph(8 * x)
    assert float(quantizer.scale) > before


@pytest.mark.parametrize(
    "options",
    [
        SVDQuantConfig(svd_rank=2, min_layer_size=0),
        RotationConfig(r1=False, r4=True),
        RotationConfig(r1=False, online_config=OnlineRotationConfig(online_rotation_layers=["*"])),
        SmoothQuantConfig(alpha=0.5),
        AutoSmoothQuantConfig(),
    ],
    ids=["branches", "R4", "online", "smooth", "autosmoothquant"],
)
def test_what_changes_inputs_inside_of_layers_is_refused(options):
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.ones(4, 8)
    layer = QuantizationConfig(weight=INT8, input_tensors=INT8)
    config = graph_config(layer, algo_config=[options])
    with pytest.raises(ValueError, match=f"{options.name} does not work on graphs"):
        ModelQuantizer(config).quantize_model(export(net, x), [x])
