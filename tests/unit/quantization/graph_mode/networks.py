"""Small networks of the families that graph mode is for, and how tests quantize them."""

import torch
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QuantizationConfig,
    QuantizationSpec,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.graph_mode.edges import MovedQuantizer, edge_quantizers
from quark.torch.quantization.nn.quantizer import TensorQuantizer

STATIC = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
INT8 = Int8PerTensorSpec("min_max", symmetric=True, **STATIC).to_quantization_spec()
UINT8 = Uint8PerTensorSpec("min_max", symmetric=False, **STATIC).to_quantization_spec()
CHANNELS = Int8PerChannelSpec(ch_axis=0, symmetric=True, **STATIC).to_quantization_spec()
INT32 = QuantizationSpec("int32", symmetric=True, qscheme="per_tensor", is_dynamic=False)
EVERYTHING = QuantizationConfig(input_tensors=INT8, output_tensors=INT8, weight=INT8)


def graph_config(layer=EVERYTHING, **options):
    """A configuration of graph mode."""
    return Config(layer, quant_mode="fx_graph_mode", log_severity_level=3, **options)


def norm(channels):
    """A batch norm with statistics that are not 0 and 1."""
    made = nn.BatchNorm2d(channels)
    made.running_mean.normal_(0, 0.1)
    made.running_var.uniform_(0.5, 1.5)
    return made


class Residual(nn.Module):
    """Two convolutions, a shortcut, activations in place, as in ResNet."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        y = self.blocks(self.pool(self.stem(x).relu()))
        return self.head(nn.functional.adaptive_avg_pool2d(y, 1).flatten(1))


class MobileNet(nn.Module):
    """Depthwise convolutions and ReLU6, as in MobileNetV2."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1, bias=False), norm(8), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(8, 16, 1, bias=False), norm(16), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), norm(16), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(16, 8, 1, bias=False), norm(8)),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 10))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class VisionTransformer(nn.Module):
    """Patches, a class token, attention by products, as in ViT."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 17, 16))
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 10)

    def attend(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * 8**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x):
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.positions
        y = y + self.attend(self.norm1(y))
        y = y + self.mlp(self.norm2(y))
        return self.head(y[:, 0])


class UNet(nn.Module):
    """Down, up and a concatenation with what was before, as in U-Net."""

    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        skip = self.down(x).relu()
        y = self.bottom(nn.functional.max_pool2d(skip, 2)).relu()
        y = self.up(y)
        z = nn.functional.interpolate(y[:, :, ::2, ::2], scale_factor=2, mode="nearest")
        return self.out(torch.cat([skip, y + z], 1))


NETWORKS = {
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "transformer": VisionTransformer,
    "unet": UNet,
}
SHAPE = (2, 3, 16, 16)


def network(name):
    """A network of random weights, in evaluation mode."""
    torch.manual_seed(0)
    return NETWORKS[name]().eval()


def images(count=3, shape=SHAPE):
    """Batches of random images."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def export(model, *args, **options):
    """The graph of a model for images, or for the given arguments."""
    return torch.export.export(model, args or (images(1)[0],), **options).module()


def frozen_graph(graph, layer=EVERYTHING, data=None, **options):
    """A graph that was quantized with data, and frozen."""
    quantizer = ModelQuantizer(graph_config(layer, **options))
    quantized = quantizer.quantize_model(graph, images() if data is None else data)
    return quantizer.freeze(quantized.eval())


def edges(graph):
    """Value -> (name of its quantizer, moved or not), in the order of the graph."""
    result = {}
    for node in graph.graph.nodes:
        module = graph.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (TensorQuantizer, MovedQuantizer)):
            quantizer = module.source if isinstance(module, MovedQuantizer) else module
            name = next(n for n, q in edge_quantizers(graph).items() if q is quantizer)
            value = node.args[0].name
            assert value not in result
            result[value] = name + (" moved" if isinstance(module, MovedQuantizer) else "")
    return result
