"""Time to quantize a graph of the shape of ResNet-50, in passes of its calibration data.

    PYTHONPATH=. python benchmarks/graph_speed.py --images 16

Weights are random. *pass* runs the calibration data through the exported float graph. The fold of
batch norms makes passes of the quantized graph cheaper.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from measure import Meter, machine
from torch import nn
from vision import WAYS
from vision_models import Residual, convolution

from quark.torch import ModelQuantizer

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride
BATCH = 4


def resnet50() -> nn.Module:
    """Return the network with random weights."""

    def block(i: int, width: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            *(*convolution(i, width, 1), nn.ReLU()),
            *(*convolution(width, width, 3, stride), nn.ReLU()),
            *convolution(width, 4 * width, 1),
        )
        same = stride == 1 and i == 4 * width
        shortcut = nn.Identity() if same else nn.Sequential(*convolution(i, 4 * width, 1, stride))
        return Residual(body, shortcut, nn.ReLU())

    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width, blocks, stride in STAGES:
        for i in range(blocks):
            layers.append(block(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def main() -> None:
    """Print the CPU seconds of a pass and of quantization, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--way", default="int8 per channel", choices=WAYS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = list(torch.randn(options.images, 3, 224, 224).split(BATCH))
    graph = torch.export.export(resnet50().eval(), (data[0],)).module()
    passes = []
    for _ in range(3):
        with Meter() as meter, torch.no_grad():
            for batch in data:
                graph(batch)
        passes.append(meter.cpu)
    with Meter() as meter:
        ModelQuantizer(WAYS[options.way].config()).quantize_model(graph, data)
    print(machine())
    print(f"pass {median(passes):.2f} s, quantize_model {meter.cpu:.2f} s,", end=" ")
    print(f"{meter.cpu / median(passes):.2f} passes")


if __name__ == "__main__":
    main()
