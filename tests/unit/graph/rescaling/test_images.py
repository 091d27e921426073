"""Rescaling of convolutions: factors of channels, in numbers and in what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.graph.discovery import discover
from quark.torch.graph.structure import RESCALING


@pytest.fixture
def image():
    return torch.randn(2, 4, 8, 8, dtype=torch.float64)


def pairs(model, x):
    """Producers with their consumers, and reasons of those that cannot be rescaled."""
    structure = discover(model, x, (RESCALING,))
    groups = {group.producer: group.consumers for group in structure.groups}
    return groups, {r.producer: r.reason for r in structure.rejected}, structure.groups


def check_same(model, x, groups):
    """Rescale all groups by random factors: parameters change, and the output does not."""
    before, output = [p.clone() for p in model.parameters()], model(x)
    for group in groups:
        group.apply_(model, torch.rand(group.size, dtype=torch.float64) + 0.5)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(model(x), output)


def conv(*sizes, **options):
    return nn.Conv2d(*sizes, **options)


CHAINS = {
    "relu": (lambda y: y.relu(), conv(6, 3, 3, padding=1)),
    "leaky relu": (lambda y: F.leaky_relu(y, 0.1), conv(6, 3, 1, bias=False)),
    "pooling": (lambda y: F.avg_pool2d(F.max_pool2d(y, 2), 2), conv(6, 3, 1)),
    "padding": (lambda y: F.pad(y, (1, 1, 1, 1), mode="reflect"), conv(6, 3, 3)),
    "upsampling": (lambda y: F.interpolate(y, scale_factor=2), conv(6, 3, 3)),
    "transposed": (lambda y: y, nn.ConvTranspose2d(6, 4, 2, stride=2)),
    "mean and linear": (lambda y: y.mean((2, 3)), nn.Linear(6, 3)),
    "pool and linear": (lambda y: F.adaptive_avg_pool2d(y, 1).flatten(1), nn.Linear(6, 3)),
    "flat and linear": (lambda y: y.flatten(1), nn.Linear(6 * 64, 3)),
    "concatenation": (lambda y: torch.cat([y, y.abs()], 1), conv(12, 3, 3)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_convolution_and_the_next_layer(net, image, name):
    function, last = CHAINS[name]
    model = net(lambda m, x: m.last(function(m.first(x))), first=conv(4, 6, 1), last=last)
    producers, reasons, groups = pairs(model, image)
    assert producers == {"first": ("last",)}, reasons
    assert groups[0].size == 6
    check_same(model, image, groups)


@pytest.mark.parametrize(
    "first",
    [
        conv(4, 6, 3, groups=2),
        conv(4, 8, 3, groups=4),
        nn.ConvTranspose2d(4, 6, 2),
    ],
)
def test_producers_of_other_kinds(net, image, first):
    last = conv(first.out_channels, 3, 3)
    model = net(lambda m, x: m.last(m.first(x).relu()), first=first, last=last)
    producers, reasons, groups = pairs(model, image)
    assert producers == {"first": ("last",)}, reasons
    check_same(model, image, groups)


@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_convolution_passes_factors_on(net, image, multiplier):
    middle = conv(6, 6 * multiplier, 3, padding=1, groups=6)
    model = net(
        lambda m, x: m.last(m.middle(m.first(x).relu()).relu()),
        **{"first": conv(4, 6, 1), "middle": middle, "last": conv(6 * multiplier, 3, 1)},
    )
    producers, reasons, groups = pairs(model, image)
    assert producers == {"first": ("last",), "middle": ("last",)}, reasons
    assert [group.size for group in groups] == [6, 6 * multiplier]
    check_same(model, image, groups)


def test_a_cap_that_is_a_parameter_is_divided_too(net, image):
    model = net(
        lambda m, x: m.last(torch.minimum(m.first(x).relu(), m.cap.view(-1, 1, 1))),
        **{"first": conv(4, 6, 1), "last": conv(6, 3, 3), "cap": nn.Parameter(torch.empty(6))},
    )
    with torch.no_grad():
        model.cap.uniform_(0.1, 0.5)
    producers, reasons, groups = pairs(model, image)
    assert producers["first"] == ("last",), reasons
    assert "cap" in {edit.parameter for edit in groups[0].edits}
    check_same(model, image, groups)


REFUSED = {
    "a fixed cap": (lambda y: F.relu6(y), conv(6, 3, 3), "goes through hardtanh"),
    "a constant": (lambda y: F.pad(y, (1, 1), value=1.0), conv(6, 3, 3), "constant_pad_nd"),
    "channels": (lambda y: y.mean(1, keepdim=True), conv(1, 3, 3), "goes through mean"),
    "groups": (lambda y: y.relu(), conv(6, 4, 3, groups=2), "goes through convolution"),
    "groups of a transposed one": (
        lambda y: y.relu(),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        "goes through convolution",
    ),
    "a maximum with data": (lambda y: torch.maximum(y, -y.tanh()), conv(6, 3, 3), "tanh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(net, image, name):
    function, last, reason = REFUSED[name]
    model = net(lambda m, x: m.last(function(m.first(x))), first=conv(4, 6, 1), last=last)
    producers, reasons, _ = pairs(model, image)
    assert producers == {}
    assert reason in reasons["first"]
