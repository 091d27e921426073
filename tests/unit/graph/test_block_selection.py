"""Blocks of models whose lists hold blocks, stages, or experts inside of blocks."""

import pytest
import torch
from torch import nn

from quark.torch.graph.discovery import discover
from quark.torch.graph.trace import trace


class Stage(nn.Module):
    """Blocks, then half as many tokens, unless it is the last stage."""

    def __init__(self, last, chained=True):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last, self.chained = last, chained

    def forward(self, x):
        if self.chained:
            for block in self.blocks:
                x = block(x)
        else:
            x = sum(block(x) for block in self.blocks)
        return x if self.last else x[:, ::2]


class PairStage(Stage):
    """A stage of Swin V2: it returns what it passes on, and that before it was cut."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x if self.last else x[:, ::2]), x


class PairModel(nn.Module):
    """Two stages, of which each receives the first item of the one before."""

    def __init__(self, reshapes=True):
        super().__init__()
        self.stages = nn.ModuleList(PairStage(not reshapes or i == 1) for i in range(2))

    def forward(self, x):
        for stage in self.stages:
            x, _ = stage(x)
        return x


class Model(nn.Module):
    """Two stages."""

    def __init__(self, reshapes=True, chained=True):
        super().__init__()
        self.stages = nn.ModuleList(Stage(not reshapes or i == 1, chained) for i in range(2))

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


INNER = [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(), INNER),
        (Model(reshapes=False), ["stages.0", "stages.1"]),
        (PairModel(), INNER),
        (PairModel(reshapes=False), ["stages.0", "stages.1"]),
        (Model(chained=False), ["stages.1"]),  # members side by side, as experts
    ],
    ids=["stages", "blocks", "pair stages", "pair blocks", "experts"],
)
def test_blocks(model, expected):
    x = torch.randn(1, 8, 8)
    record = trace(model, lambda: model(x))
    assert list(record.blocks) == expected
    homes = {op.module: op.block for op in record.ops if ".blocks." in op.module}
    assert homes == {
        name: next((b for b in expected if f"{name}.".startswith(f"{b}.")), "") for name in INNER
    }


def test_discovery_of_stages():
    model = Model()
    assert discover(model, torch.randn(1, 8, 8)).blocks == tuple(INNER)


def test_parametrizations_of_a_weight_are_no_blocks():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(layer, nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
    assert discover(model.eval(), torch.randn(1, 8, 8)).blocks == ()
