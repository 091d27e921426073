r"""Quantize a vision model as a graph, train it, and write it for PyTorch and for ONNX Runtime.

    python quantize_graph.py --output_dir OUT

The model is a small residual network. The pictures are made here: stripes that lie, stripes that
stand, and checks, in noise. For your own, replace ``build_model`` and ``make_pictures``. OUT gets
``net_quantized.pth`` (``load_params``, or torch alone) and ``onnx/quark_model.onnx``.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch import ModelQuantizer, export_onnx, save_params
from quark.torch.quantization.config.config import (
    Int8PerChannelSpec,
    QConfig,
    QLayerConfig,
    QuantizationSpec,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.config.type import QuantizationMode
from quark.torch.training import freeze_ranges

BATCH, SIDE = 32, 16


class Network(nn.Module):
    """Two convolutions with a shortcut between convolutions with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(
            *(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU6()),
            *(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8)),
        )
        self.last = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (pictures, 3), of pictures (pictures, 1, height, width)."""
        y = self.stem(x)
        y = self.last((y + self.body(y)).relu())
        logits: torch.Tensor = self.head(y.mean((2, 3)))
        return logits


def build_model() -> nn.Module:
    """Return a network with random weights."""
    return Network()


def make_pictures(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures, (count, 1, SIDE, SIDE), and what each shows, (count,)."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=random)
    phase = 8 * torch.rand(2, count, 1, 1, generator=random)
    place = torch.arange(SIDE).float()
    rows = torch.sin(place[:, None] + phase[0]).expand(-1, SIDE, SIDE)
    columns = torch.sin(place[None, :] + phase[1]).expand(-1, SIDE, SIDE)
    shown = torch.stack([rows, columns, rows * columns], 1)[torch.arange(count), labels]
    noise = torch.randn(shown.shape, generator=random)
    return (shown + noise)[:, None], labels


def train(
    model: nn.Module, steps: int, rate: float, halfway: Callable[[], object] | None = None
) -> None:
    """Train a model in place; it ends in evaluation mode."""
    images, labels = make_pictures(BATCH * 40, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    model.train()
    for step in range(steps):
        if halfway is not None and step == steps // 2:
            halfway()
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of correct pictures among those of a test."""
    images, labels = make_pictures(512, seed=2)
    return float((model(images).argmax(1) == labels).double().mean())


def make_config() -> QConfig:
    """Return int8 weights per channel, uint8 values between operators, and int32 biases."""
    weight = Int8PerChannelSpec(
        ch_axis=0,
        symmetric=True,
        scale_type="float",
        round_method="half_even",
        is_dynamic=False,
    ).to_quantization_spec()
    value = Uint8PerTensorSpec(
        observer_method="min_max",
        symmetric=False,
        scale_type="float",
        round_method="half_even",
        is_dynamic=False,
    ).to_quantization_spec()
    bias = QuantizationSpec("int32", qscheme="per_tensor", symmetric=True, is_dynamic=False)
    layer = QLayerConfig(input_tensors=value, output_tensors=value, weight=weight, bias=bias)
    return QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode, exclude=[])


def main() -> None:
    """Train, quantize, train on, and write."""
    parser = argparse.ArgumentParser(description="Quantize a vision model as a graph.")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200, help="of the training of the float model")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model()
    train(model, options.steps, 1e-2)
    print(f"float: {accuracy(model):.3f}")

    images, _ = make_pictures(BATCH * 4, seed=1)
    example = (images[:BATCH],)
    shapes = ({0: torch.export.Dim("batch")},)
    graph = torch.export.export(model, example, dynamic_shapes=shapes).module()
    quantizer = ModelQuantizer(make_config())
    quantized = quantizer.quantize_model(graph, list(images.split(BATCH)))
    print(f"quantized: {accuracy(quantized):.3f}")

    train(quantized, options.steps // 4, 1e-3, lambda: freeze_ranges(quantized))
    frozen = quantizer.freeze(quantized)
    print(f"trained: {accuracy(frozen):.3f}")

    graph_mode = QuantizationMode.fx_graph_mode
    save_params(frozen, "net", args=example, export_dir=options.output_dir, quant_mode=graph_mode)
    export_onnx(model=frozen, output_dir=options.output_dir / "onnx", input_args=example)


if __name__ == "__main__":
    main()
