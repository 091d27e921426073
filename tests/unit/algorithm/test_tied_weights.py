"""One weight in several layers: each layer is rounded once, for its own inputs."""

import pytest
import torch
from torch import nn

from quark.torch import ModelImporter, ModelQuantizer
from quark.torch.quantization.config.algo import (
    AutoRoundConfig,
    GPTQConfig,
    QronosConfig,
)
from quark.torch.quantization.config.config import Config
from quark.torch.quantization.config.presets import scheme


class Block(nn.Module):
    """A residual branch of two layers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32, bias=False)
        self.down = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    """Two blocks with one weight between them."""

    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        if tied:
            self.layers[1].up.weight = self.layers[0].up.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def quantize(model, algorithm, x):
    config = Config(global_quant_config=scheme("int4_wo_32"), algo_config=[algorithm])
    return ModelQuantizer.freeze(ModelQuantizer(config).quantize_model(model, [x]))


@pytest.mark.parametrize(
    "algorithm",
    [GPTQConfig(), QronosConfig(), AutoRoundConfig(iters=3)],
    ids=lambda options: options.name,
)
@torch.no_grad()
def test_each_layer_is_rounded_for_its_own_inputs(algorithm, export):
    apart = Model(tied=False)
    apart.layers[1].up.weight.copy_(apart.layers[0].up.weight)
    apart.layers[1].down.weight.copy_(Model().layers[1].down.weight)
    x = torch.randn(64, 32)
    with torch.enable_grad():
        expected, model = quantize(apart, algorithm, x), quantize(Model(), algorithm, x)
    assert torch.equal(model(x), expected(x))
    path = export(model)
    again = ModelImporter(str(path), "safetensors").import_model_info(Model())
    assert torch.equal(again(x), model(x))
