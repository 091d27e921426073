"""Activations in other forms, which options ask for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.config.graph import PassOptions
from quark.torch.quantization.graph_mode.passes.preparation import prepare


def test_activations_stay_unless_asked_for(net, export, operations, image):
    model = net(lambda m, x: F.silu(x) + F.gelu(x) + F.relu6(x))
    graph = prepare(export(model, image), image)
    assert operations(graph) == {"silu": 1, "gelu": 1, "relu6": 1, "add": 2}


def test_hard_forms(net, export, image):
    model = net(lambda m, x: torch.stack([F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh")]))
    graph = prepare(export(model, image), image, PassOptions(hard_activations=True))
    silu, gelu, tanh = graph(image)
    torch.testing.assert_close(silu, image * ((image + 3) / 6).clamp(0, 1))
    torch.testing.assert_close(gelu, image * ((1.702 * image + 3) / 6).clamp(0, 1))
    torch.testing.assert_close(tanh, gelu)
    assert (gelu - F.gelu(image)).abs().max() < 0.2


@pytest.mark.parametrize(
    ("activation", "cap"),
    [(nn.ReLU6(), 6.0), (nn.Hardtanh(0, 2), 2.0), (lambda x: x.clamp(0, 1.5), 1.5)],
)
def test_caps_are_parameters(net, export, operations, image, activation, cap):
    model = net(
        lambda m, x: activation(m.norm(m.conv(5 * x))),
        **{"conv": nn.Conv2d(4, 6, 3)},
        norm=nn.BatchNorm2d(6),
    )
    graph = prepare(export(model, image), image, PassOptions(channel_caps=True))
    assert operations(graph) == {"mul": 1, "conv2d": 1, "relu": 1, "view": 1, "minimum": 1}
    torch.testing.assert_close(graph(image), model(image), rtol=1e-4, atol=1e-4)
    assert graph(image).detach().max() == cap
    [caps] = [p for p in graph.parameters() if not p.requires_grad]
    assert caps.tolist() == [cap] * 6


def test_other_bounds_have_no_cap(net, export, operations, image):
    model = net(
        lambda m, x: F.hardtanh(m.conv(x)) + F.relu6(m.conv(x) + 1), conv=nn.Conv2d(4, 6, 3)
    )
    graph = prepare(export(model, image), image, PassOptions(channel_caps=True))
    assert operations(graph) == {"conv2d": 2, "hardtanh": 1, "relu6": 1, "add": 2}
