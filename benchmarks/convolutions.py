"""Accuracy of small convolutional networks, rounded with and without compensation.

    PYTHONPATH=. python benchmarks/convolutions.py     # needs scikit-learn

Each network is trained on handwritten digits that scikit-learn ships (1797 images of 8 by 8),
deterministically, in a few seconds. Weights are quantized to int4 per channel.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.algo import (
    AlgoConfig,
    AutoRoundConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    YaqaConfig,
)
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec

SEEDS = (0, 1, 2)
EPOCHS = 12
ALGORITHMS: dict[str, list[AlgoConfig]] = {
    "nearest": [],
    "gptq": [GPTQConfig()],
    "gptaq": [GPTAQConfig()],
    "qronos": [QronosConfig()],
    "yaqa": [YaqaConfig()],
    "autoround": [AutoRoundConfig()],
}


class Block(nn.Module):
    """A residual block, plain or inverted with a depthwise convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, inverted: bool) -> None:
        super().__init__()
        width = 4 * inputs if inverted else outputs
        first = (1, 1, 0, 1) if inverted else (3, stride, 1, 1)
        layers = [self._activated(inputs, width, *first)]
        if inverted:
            layers.append(self._activated(width, width, 3, stride, 1, width))
        last = (1, 1, 0) if inverted else (3, 1, 1)
        self.body = nn.Sequential(
            *layers, nn.Conv2d(width, outputs, *last, bias=False), nn.BatchNorm2d(outputs)
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    @staticmethod
    def _activated(i: int, o: int, kernel: int, stride: int, pad: int, groups: int) -> nn.Module:
        layer = nn.Conv2d(i, o, kernel, stride, pad, groups=groups, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(o), nn.ReLU6())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the body to the shortcut."""
        y: torch.Tensor = self.shortcut(x) + self.body(x)
        return y


class Network(nn.Module):
    """A stem, four blocks, and a linear layer."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6()
        )
        sizes = [(16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2)]
        self.blocks = nn.Sequential(*(Block(i, o, s, inverted) for i, o, s in sizes))
        self.head = nn.Linear(48, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of images, (images, 1, 8, 8)."""
        y: torch.Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return y


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (1797, 1, 8, 8), from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(data.target)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """Train a network with Adam and random shifts, and return it for evaluation."""
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    steps = EPOCHS * (len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images))[: len(images) // 64 * 64].view(-1, 64):
            dx, dy = torch.randint(-1, 2, (2,)).tolist()
            loss = F.cross_entropy(model(images[rows].roll((dx, dy), (2, 3))), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def measure(
    model: nn.Module, reference: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> tuple[float, float]:
    """Return the accuracy in percent, and the mean squared change of the logits."""
    logits = model(images)
    change = float((logits - reference(images)).square().mean())
    return 100 * float((logits.argmax(1) == labels).float().mean()), change


def main() -> None:
    """Print a table for each kind of network."""
    images, labels = load_digits()
    spec = QuantizationSpec(
        "int4",  # type: ignore[arg-type]
        qscheme="per_channel",  # type: ignore[arg-type]
        ch_axis=0,
        symmetric=True,
        is_dynamic=False,
    )
    for title, inverted in (("residual blocks", False), ("inverted, depthwise", True)):
        print(f"| {title} | accuracy, % | change of logits² | seconds |\n| --- | --- | --- | --- |")
        rows: dict[str, list[tuple[float, float, float]]] = {}
        for seed in SEEDS:
            torch.manual_seed(seed)
            split = torch.randperm(len(images))
            training, test = split[:1200], split[1200:]
            model = train(Network(inverted), images[training], labels[training])
            accuracy, _ = measure(model, model, images[test], labels[test])
            rows.setdefault("float", []).append((accuracy, 0.0, 0.0))
            for name, algorithms in ALGORITHMS.items():
                config = Config(QuantizationConfig(weight=spec), algo_config=algorithms or None)
                start = time.perf_counter()
                quantized = ModelQuantizer(config).quantize_model(
                    copy.deepcopy(model), [images[training[:256]]]
                )
                took = time.perf_counter() - start
                result = measure(quantized, model, images[test], labels[test])
                rows.setdefault(name, []).append((*result, took))
        for name, results in rows.items():
            means = [statistics.mean(column) for column in zip(*results, strict=True)]
            each = ", ".join(f"{accuracy:.1f}" for accuracy, *_ in results)
            print(f"| {name} | {means[0]:.1f} ({each}) | {means[1]:.3g} | {means[2]:.1f} |")


if __name__ == "__main__":
    main()
