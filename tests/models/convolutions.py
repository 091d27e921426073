"""Tiny random networks of convolutions: residual, inverted residual, U-shaped, plain."""

import torch
import torch.nn.functional as F
from torch import nn

from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec


def _activated(inputs, outputs, kernel=3, stride=1, groups=1, activation=nn.ReLU):
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), activation(inplace=True))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.body = _activated(inputs, outputs, stride=stride)
        self.convolution = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        y = self.norm(self.convolution(self.body(x)))
        y += self.shortcut(x)
        return F.relu_(y)


class Inverted(nn.Module):
    """The block of a MobileNetV2, with a gate as in an EfficientNet."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        width = 4 * inputs
        self.widen = _activated(inputs, width, 1, activation=nn.ReLU6)
        self.depthwise = _activated(width, width, 3, stride, width, nn.ReLU6)
        self.gate = Gate(width)
        self.narrow = nn.Sequential(nn.Conv2d(width, outputs, 1), nn.BatchNorm2d(outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        y = self.narrow(self.gate(self.depthwise(self.widen(x))))
        return x + y if self.adds else y


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Classifier(nn.Module):
    """A stem, stages of blocks, and a linear layer."""

    def __init__(self, block):
        super().__init__()
        self.stem = _activated(3, 8)
        self.stage1 = nn.Sequential(block(8, 8), block(8, 8))
        self.stage2 = nn.Sequential(block(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.stage2(self.stage1(self.stem(x))).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = _activated(3, 8), _activated(8, 16, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 3, 2, padding=1, output_padding=1)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        x = self.down1(x)
        return self.out(torch.cat([x, F.relu_(self.up(self.down2(x)))], 1))


class Repeated(nn.Module):
    """A layer that runs twice in one module, which writes to its input."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.once = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x *= 0.5
        return self.once(x + self.twice(F.relu(self.twice(x))))


class Checked(nn.Module):
    """A layer that checks its input."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 4, 3)

    def forward(self, x):
        if x.shape[1] != 8:
            raise ValueError(f"8 channels are expected, got {x.shape[1]}")
        return self.convolution(x)


def plain():
    """Layers one after the other, with padding by reflection, dilation, and one after a view."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, dilation=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 6 * 6, 5),
    )


def wave():
    """A model of speech of Transformers with its extractor of features, and a batch for it."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 32}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_conv_pos_embeddings": 4}
    kernels = {"conv_dim": (16, 24), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    plain = {"num_conv_pos_embedding_groups": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **layers, **kernels, **plain)).eval()
    generator = torch.Generator().manual_seed(1)
    return model, {"input_values": torch.randn(4, 320, generator=generator).cumsum(1) / 8}


NETS = {
    "ResNet": lambda: Classifier(Residual),
    "MobileNet": lambda: Classifier(Inverted),
    "U-Net": UNet,
    "plain": plain,
    "checked": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Checked()),
    "repeated": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Repeated(), nn.Conv2d(8, 4, 1)),
}


def network(name):
    """One of ``NETS``, with random norms, the same each time."""
    torch.manual_seed(0)
    model = NETS[name]().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            module.running_mean.normal_(std=0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model


def images(count=12, seed=1):
    """Random smooth images, 16 by 16."""
    generator = torch.Generator().manual_seed(seed)
    return F.avg_pool2d(torch.randn(count, 3, 18, 18, generator=generator), 3, 1) * 3


def int4(axis=0, **changes):
    """Symmetric int4 per channel, or as changed."""
    options = {"qscheme": "per_channel", "ch_axis": axis, "symmetric": True, "is_dynamic": False}
    return QuantizationSpec("int4", **options | changes)


def configured(spec, *algorithms, **rest):
    """A configuration of weights with algorithms."""
    return Config(QuantizationConfig(weight=spec), algo_config=list(algorithms) or None, **rest)


@torch.no_grad()
def output_error(model, reference, data):
    """The squared change of the outputs, relative to their variance."""
    expected = reference(data)
    return float((model(data) - expected).square().mean() / expected.var())
