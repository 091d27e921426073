"""The passes on nets of several families: same function, no batch norm, same names of layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.graph_mode.passes.preparation import prepare


def block(inputs, outputs, size=3, activation=nn.ReLU, **options):
    conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation(inplace=True))


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(block(width, width), *block(width, width)[:2])

    def forward(self, x):
        y = self.body(x)
        y += x
        return F.relu(y, inplace=True)


class Inverted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.expand = block(width, 4 * width, 1, nn.ReLU6)
        self.depthwise = block(4 * width, 4 * width, 3, nn.ReLU6, groups=4 * width)
        self.project = block(4 * width, width, 1)[:2]

    def forward(self, x):
        return x + self.project(self.depthwise(self.expand(x)))


class Dense(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x):
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.inner = block(3, 8), block(8, 16)
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2, bias=False), nn.BatchNorm2d(8))
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        y = self.down(x)
        return self.out(torch.cat([y, self.up(self.inner(F.max_pool2d(y, 2)))], 1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 1, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(len(x), -1, -1), y], 1)
        return self.head(self.layer(y)[:, 0])


def classifier(*layers, width=8):
    tail = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(width, 5))
    return nn.Sequential(block(3, 8), *layers, *tail)


NETS = {
    "residual": lambda: classifier(Residual(8), Residual(8)),
    "inverted": lambda: classifier(Inverted(8), Inverted(8)),
    "dense": lambda: classifier(Dense(8), Dense(12), nn.BatchNorm2d(16), width=16),
    "u": UNet,
    "transformer": Transformer,
}


@pytest.mark.parametrize("name", NETS)
def test_nets(net, export, operations, name):
    torch.manual_seed(0)
    model = net(lambda m, x: m.net(x), net=NETS[name]())
    image = torch.randn(2, 3, 8, 8)
    graph = prepare(export(model, image), image)
    counts = operations(graph)
    assert not counts.keys() & {"batch_norm", "dropout"}
    assert not [n for n in counts if n.endswith("_")]
    torch.testing.assert_close(graph(image), model(image), rtol=1e-3, atol=1e-3)
    names = {n for n, _ in model.named_modules()}
    assert {n.rpartition(".")[0] for n, _ in graph.named_parameters()} <= names
    if name != "dense":  # whose batch norms follow a concatenation
        layers = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
        count = sum(isinstance(m, layers) for m in model.modules())
        products = sum(counts.get(n, 0) for n in ("conv2d", "conv_transpose2d", "linear"))
        assert products == count + (name == "transformer")  # queries, keys and values: one weight
