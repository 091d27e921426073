"""Units of models: residual blocks, and single layers where there are none."""

import pytest
import torch
from torch import nn

from quark.torch.graph.discovery import discover
from tests.models.convolutions import images, network
from tests.models.matrix import FAMILIES

UNITS = {
    "ResNet": ("stem.0", "stage1.0", "stage1.1", "stage2.0", "head"),
    "MobileNet": ("stem.0", "stage1.0", "stage1.1", "stage2.0", "head"),
    "U-Net": ("down1.0", "down2.0", "up", "out"),
    "plain": ("0", "2", "5"),
    "checked": ("0", "1.convolution"),
    "repeated": ("0", "1", "2"),
}


@pytest.mark.parametrize("name", UNITS)
def test_networks_without_lists(name):
    structure = discover(network(name), images(1))
    assert structure.units == UNITS[name] and structure.blocks == ()


class Decoder(nn.Module):
    """Blocks in a list between an embedding of patches and a head."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.mix, self.head = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mix(x.transpose(1, 2)).mean(2))


def test_convolutions_around_blocks():
    structure = discover(Decoder(), images(1))
    assert structure.blocks == ("layers.0", "layers.1")
    assert structure.units == ("patches", "layers.0", "layers.1", "mix")


@pytest.mark.parametrize(
    ("family", "name", "units"),
    [
        ("vision", "ViT", ["embeddings.patch_embeddings.projection", "layers.0", "layers.1"]),
        (
            "vision",
            "ResNet",
            ["embedder.embedder.convolution"]
            + [f"encoder.stages.{i}.layers.{j}" for i in range(2) for j in range(2)]
            + ["classifier.1"],
        ),
        (
            "encoder-decoder",
            "Whisper",
            ["encoder.conv1", "encoder.conv2"]
            + [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(2)],
        ),
        ("encoder", "BERT", ["encoder.layer.0", "encoder.layer.1"]),
    ],
    ids=["ViT", "ResNet", "Whisper", "BERT"],
)
def test_models_of_transformers(family, name, units):
    [case] = [case for case in FAMILIES[family] if case.name == name]
    found = discover(case.build(), case.batch()).units
    prefix = f"{next(iter(found)).partition('.')[0]}."
    assert [unit.removeprefix(prefix) for unit in found] == units


class Loop(nn.Module):
    """A layer that runs twice in the model itself."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.twice(torch.relu(self.twice(self.first(x))))


def test_a_layer_that_runs_twice_in_the_model_is_no_unit():
    assert discover(Loop(), images(1)).units == ("first",)
