"""Factors through convolutions, batch norms and pools: which layers, and the same function."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.graph.discovery import discover
from tests.models.convolutions import images, network

GROUPS = {
    "ResNet": [
        (f"{block}.body.1", (f"{block}.convolution",))
        for block in ("stage1.0", "stage1.1", "stage2.0")
    ],
    "U-Net": [
        ("down1.1", ("down2.0", "out")),
        ("down2.1", ("up",)),
        ("up", ("out",)),
    ],
    "MobileNet": [
        *(
            (f"{block}.gate.squeeze", (f"{block}.gate.excite",))
            for block in ("stage1.0", "stage1.1", "stage2.0")
        ),
        ("stage2.0.narrow.1", ("head",)),
    ],
}


def rescaled(model, groups):
    """Apply random factors to all groups."""
    generator = torch.Generator().manual_seed(4)
    for group in groups:
        group.apply_(model, torch.rand(group.size, generator=generator) * 3 + 0.3)
    return model


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_networks(name):
    model, x = network(name).double(), images(3).double()
    groups = discover(model, x[:1]).groups
    assert [(g.producer, g.consumers) for g in groups] == GROUPS[name]
    expected, before = model(x), {n: p.clone() for n, p in model.named_parameters()}
    torch.testing.assert_close(rescaled(model, groups)(x), expected)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {edit.parameter for group in groups for edit in group.edits}


class Pools(nn.Module):
    """Everything between two layers that keeps the factor of each channel."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1), between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


PASSING = {
    "max": lambda x: F.max_pool2d(x, 2),
    "average": lambda x: F.avg_pool2d(x, 3, 1),
    "whole": lambda x: F.adaptive_avg_pool2d(x, 1),
    "parts": lambda x: F.adaptive_avg_pool2d(x, 3),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group norm": nn.GroupNorm(2, 6),
}


@pytest.mark.parametrize("between", PASSING.values(), ids=PASSING)
def test_factors_pass(between):
    model, x = Pools(between).double(), images(2).double()
    [group] = discover(model, x).groups
    producer = "between" if isinstance(between, nn.Module) else "first"
    assert (group.producer, group.consumers, group.size) == (producer, ("last",), 6)
    expected = model(x)
    torch.testing.assert_close(rescaled(model, [group])(x), expected)


STOPPING = {
    "relu6": F.relu6,
    "silu": F.silu,
    "mean over channels": lambda x: x - x.mean(1, keepdim=True),
    "a constant": lambda x: x + 1,
}


@pytest.mark.parametrize("between", STOPPING.values(), ids=STOPPING)
def test_factors_stop(between):
    structure = discover(Pools(between), images(2))
    assert structure.groups == ()
    assert "first" in {rejection.producer for rejection in structure.rejected}


def test_groups_of_channels_keep_their_inputs():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2))
    assert discover(model, images(2)).groups == ()


def test_depthwise_convolutions_pass_factors_on():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 1)
    ).double()
    x = images(2).double()
    groups = discover(model, x).groups
    assert [(g.producer, g.consumers) for g in groups] == [("0", ("3",)), ("1", ("3",))]
    expected = model(x)
    torch.testing.assert_close(rescaled(model, groups)(x), expected)


def test_transposed_convolutions_of_groups_are_left_alone():
    model = nn.Sequential(nn.ConvTranspose2d(3, 6, 3, groups=3), nn.Conv2d(6, 4, 1))
    assert discover(model, images(2)).groups == ()
