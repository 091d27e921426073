"""Small vision networks: classifiers, a segmenter and a detector."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

SPREAD = 5.0  # octaves between the gains of batch norms when training begins


def convolution(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution that keeps the size but for its stride, and a batch norm."""
    layer = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [layer, nn.BatchNorm2d(o)]


class Residual(nn.Module):
    """Adds what a body computes to its input, if both have the same shape or a shortcut exists."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None, after: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut, self.after = body, shortcut, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, (images, channels, height, width)."""
        y = self.body(x)
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        result: torch.Tensor = self.after(y)
        return result


class Classifier(nn.Module):
    """Features, their mean over space, and a linear layer."""

    def __init__(self, features: list[nn.Module], width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (images, 10)."""
        y: torch.Tensor = self.head(self.features(x).mean((2, 3)))
        return y


def resnet() -> nn.Module:
    """Return a ResNet with six residual blocks."""

    def block(i: int, o: int, stride: int) -> nn.Module:
        body = nn.Sequential(*convolution(i, o, 3, stride), nn.ReLU(), *convolution(o, o, 3))
        same = stride == 1 and i == o
        shortcut = nn.Identity() if same else nn.Sequential(*convolution(i, o, 1, stride))
        return Residual(body, shortcut, nn.ReLU())

    sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [block(*size) for size in sizes]
    return Classifier([*convolution(1, 16, 3, 2), nn.ReLU(), *blocks], 64)


def mobilenet() -> nn.Module:
    """Return a network of inverted residuals, as MobileNetV2: depthwise layers and ReLU6."""

    def block(i: int, o: int, stride: int) -> nn.Module:
        width = 4 * i
        body = nn.Sequential(
            *(*convolution(i, width, 1), nn.ReLU6()),
            *(*convolution(width, width, 3, stride, width), nn.ReLU6()),
            *convolution(width, o, 1),
        )
        same = stride == 1 and i == o
        return Residual(body, nn.Identity() if same else None, nn.Identity())

    sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)]
    last = [*convolution(32, 128, 1), nn.ReLU6()]
    stem = [*convolution(1, 16, 3, 2), nn.ReLU6()]
    return Classifier([*stem, *(block(*size) for size in sizes), *last], 128)


def spread_mobilenet() -> nn.Module:
    """Return ``mobilenet`` whose batch norms begin with gains of very different sizes.

    Weight decay and dying channels leave large networks with such channels after long training.
    """
    model = mobilenet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 1 - SPREAD, 1)
            module.weight.data.exp2_()
    return model


class Segmenter(nn.Module):
    """A small U-Net: three resolutions, transposed convolutions, concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*convolution(1, 12, 3), nn.ReLU())
        self.second = nn.Sequential(*convolution(12, 24, 3, 2), nn.ReLU())
        self.third = nn.Sequential(
            *(*convolution(24, 48, 3, 2), nn.ReLU(), *convolution(48, 48, 3), nn.ReLU())
        )
        self.up1 = nn.ConvTranspose2d(48, 24, 2, 2)
        self.join1 = nn.Sequential(*convolution(48, 24, 3), nn.ReLU())
        self.up2 = nn.ConvTranspose2d(24, 12, 2, 2)
        self.join2 = nn.Sequential(*convolution(24, 12, 3), nn.ReLU())
        self.head = nn.Conv2d(12, 11, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (images, 11, height, width)."""
        first = self.first(x)
        second = self.second(first)
        y = self.join1(torch.cat([self.up1(self.third(second)), second], 1))
        z: torch.Tensor = self.head(self.join2(torch.cat([self.up2(y), first], 1)))
        return z


class Attention(nn.Module):
    """Self-attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of attention, (images, tokens, width)."""
        heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        z: torch.Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Transformer(nn.Module):
    """A vision transformer: 36 patches of 4 by 4, four blocks with the norms in front."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(36, width))
        mlp = [nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
        bodies = (b for _ in range(4) for b in ([Attention(width)], mlp))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), *(copy.deepcopy(layer) for layer in body))
            for body in bodies
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (images, 10)."""
        y = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            y = y + block(y)
        z: torch.Tensor = self.head(self.norm(y).mean(1))
        return z


class Detector(nn.Module):
    """A detector in one stage: for each cell of 4 by 4 pixels, which digit has its center there.

    Features of three resolutions are added from the lowest to the highest.
    """

    def __init__(self) -> None:
        super().__init__()

        def stage(i: int, o: int, stride: int = 2) -> nn.Module:
            return nn.Sequential(*convolution(i, o, 3, stride), nn.ReLU())

        self.second = nn.Sequential(stage(1, 16), stage(16, 32))
        self.third, self.fourth = stage(32, 48), stage(48, 64)
        self.lateral2, self.lateral3 = nn.Conv2d(32, 32, 1), nn.Conv2d(48, 32, 1)
        self.lateral4 = nn.Conv2d(64, 32, 1)
        self.head = nn.Sequential(stage(32, 32, 1), nn.Conv2d(32, 11, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (images, 11, height / 4, width / 4)."""
        second = self.second(x)
        third = self.third(second)
        y = self.lateral3(third) + F.interpolate(self.lateral4(self.fourth(third)), scale_factor=2)
        z: torch.Tensor = self.head(self.lateral2(second) + F.interpolate(y, scale_factor=2))
        return z
