"""A small UNet: blocks get their input by name, write in place, and have skip connections."""

import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.graph.discovery import discover
from quark.torch.pipeline.runner import run_blocks
from quark.torch.quantization.config.algo import AutoRoundConfig, AWQConfig, GPTQConfig
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme
from tests.unit.pipeline.test_runner import equal, run, seen_by


class Block(nn.Module):
    """A residual layer that adds the time and a skip connection."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.time = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(8, 32)

    def forward(self, *, sample, temb, skip=None):
        x = sample.clone()
        x += self.time(temb)[:, None]
        if skip is not None:
            x[:, :4] += skip[:, :4]
        return sample + self.down(self.up(x).relu_())


class UNet(nn.Module):
    """Two blocks down, two blocks up, each with the output of its partner."""

    def __init__(self):
        super().__init__()
        self.down_blocks = nn.ModuleList(Block() for _ in range(2))
        self.up_blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, sample, timestep):
        temb = torch.sin(timestep[:, None] * torch.arange(1.0, 9.0))
        skips = []
        for block in self.down_blocks:
            sample = block(sample=sample, temb=temb)
            skips.append(sample)
        for block in self.up_blocks:
            sample = block(sample=sample, temb=temb, skip=skips.pop())
        return sample


def batches():
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "sample": torch.randn(2, n, 32, generator=generator),
            "timestep": torch.tensor([0.1 * n, 0.2]),
        }
        for n in (6, 9)
    ]


NAMES = [f"{side}_blocks.{i}" for side in ("down", "up") for i in range(2)]


def test_blocks_give_what_they_give_in_the_model():
    model, data = UNet(), batches()
    assert discover(model, data[0]).blocks == tuple(NAMES)
    equal(run(model, NAMES, data), seen_by(model, NAMES, data))


@torch.no_grad()
def test_later_blocks_see_the_changed_ones():
    model, data, found = UNet(), batches(), {}
    for block in run_blocks(model, NAMES, data, "test"):
        block.module.down.weight.mul_(0.5)
        block.run()
        found[block.name] = [block.outputs(i).clone() for i in range(len(block))]
    equal(found, seen_by(model, NAMES, data))


class Again(nn.Module):
    """Four blocks, of which the last receives an earlier hidden state again."""

    def __init__(self, depth):
        super().__init__()
        self.blocks, self.depth = nn.ModuleList(Block() for _ in range(4)), depth

    def forward(self, sample, timestep):
        temb = torch.sin(timestep[:, None] * torch.arange(1.0, 9.0))
        states = []
        for block in self.blocks:
            skip = states[self.depth] if len(states) == 3 else None
            states.append(sample := block(sample=sample, temb=temb, skip=skip))
        return sample


@pytest.mark.parametrize("depth", range(3))
def test_a_block_that_receives_an_earlier_state_again(depth):
    model, data, names = Again(depth), batches(), [f"blocks.{i}" for i in range(4)]
    equal(run(model, names, data), seen_by(model, names, data))
    found = {}
    with torch.no_grad():
        for block in run_blocks(model, names, data, "test"):
            block.module.down.weight.mul_(0.5)
            block.run()
            found[block.name] = [block.outputs(i).clone() for i in range(len(block))]
    equal(found, seen_by(model, names, data))


@pytest.mark.parametrize(
    "algorithm",
    [GPTQConfig(), AWQConfig(), AutoRoundConfig(iters=2)],
    ids=lambda options: options.name,
)
def test_algorithms_run(algorithm):
    torch.manual_seed(0)
    model, data = UNet(), batches()
    before = model(**data[0])
    config = Config(
        global_quant_config=scheme("int4_wo_32"), exclude=["*time"], algo_config=[algorithm]
    )
    ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, data))
    error = (model(**data[0]) - before).norm() / before.norm()
    assert 0 < error < 0.1
