"""Small vision networks, trained once on pictures that are composed of handwritten digits.

``load(name)`` trains a network deterministically, in a minute or two, and stores it in
``build/vision``; later calls read the file. ``material(name)`` returns its pictures. The digits are
those of scikit-learn, 1797 of 8 by 8 values: 1200 for training and calibration, 597 for the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from packaged_nets import TOLERANCE, cents, load_crepe, notes
from safetensors.torch import load_file, save_file
from torch import nn

CACHE = Path(__file__).resolve().parent.parent / "build" / "vision"
DIGITS = CACHE / "digits.safetensors"
TRAINING, TEST = 1200, 597  # digits
COPIES = 8  # pictures of each digit of the training
TEST_COPIES = 4
CALIBRATION = 256  # pictures
BATCH = 64
SPREAD = 5.0  # octaves between the gains of batch norms when training begins


@dataclass
class Pictures:
    """Pictures and what they show.

    Attributes:
        images: (pictures, 1, height, width).
        labels: (pictures,) digits, or (pictures, height, width) classes of pixels: 0 to 9 the
            digit, 10 the background. For notes, (frames,) pitches in cents, float64.
        digits: Number of digits that the pictures were made of; picture i shows digit i % digits.
            For notes, the number of frames.
    """

    images: torch.Tensor
    labels: torch.Tensor
    digits: int


@dataclass
class Material:
    """Pictures for training and test; those for calibration are a part of the former."""

    training: Pictures
    test: Pictures

    @property
    def calibration(self) -> list[torch.Tensor]:
        """Return batches of pictures for calibration."""
        return list(self.training.images[:CALIBRATION].split(BATCH))


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


@dataclass(frozen=True)
class Net:
    """A network and how it is trained.

    Attributes:
        build: Returns the network.
        epochs: Passes over the pictures of the training; 0 for a network that is trained already.
        rate: Largest learning rate.
        segments: Whether it classifies pixels.
    """

    build: Callable[[], nn.Module]
    epochs: int = 0
    rate: float = 0.0
    segments: bool = False


NETS = {
    "resnet": Net(resnet, 6, 4e-3),
    "mobilenet": Net(mobilenet, 8, 6e-3),
    "mobilenet, spread": Net(spread_mobilenet, 8, 6e-3),
    "segmenter": Net(Segmenter, 5, 6e-3, segments=True),
    "crepe, tiny": Net(lambda: load_crepe("tiny")),
    "crepe, full": Net(lambda: load_crepe("full")),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return all digits in a fixed random order: (1797, 8, 8) from 0 to 1, and their labels."""
    if not DIGITS.is_file():
        from sklearn.datasets import load_digits

        data = load_digits()
        order = torch.randperm(TRAINING + TEST, generator=torch.Generator().manual_seed(0))
        tensors = {
            "images": (torch.tensor(data.images, dtype=torch.float32) / 16)[order],
            "labels": torch.tensor(data.target, dtype=torch.int64)[order],
        }
        CACHE.mkdir(parents=True, exist_ok=True)
        save_file(tensors, DIGITS)
    stored = load_file(DIGITS)
    return stored["images"], stored["labels"]


def material(name: str) -> Material:
    """Return the pictures of a network."""
    if NETS[name].epochs == 0:
        training, test = (
            Pictures(*notes(count, seed), count) for count, seed in ((256, 1), (800, 2))
        )
        return Material(training, test)
    images, labels = digits()
    segments = NETS[name].segments
    training = compose(images[:TRAINING], labels[:TRAINING], COPIES, segments, seed=1)
    return Material(
        training, compose(images[TRAINING:], labels[TRAINING:], TEST_COPIES, segments, seed=2)
    )


def compose(
    images: torch.Tensor, labels: torch.Tensor, copies: int, segments: bool, seed: int
) -> Pictures:
    """Return pictures that show each digit ``copies`` times, at random places, in noise.

    For classification a canvas of 24 by 24 shows a digit of 16 by 16, and a faint one behind it.
    For segmentation a canvas of 32 by 32 shows two, of which one may cover the other.
    """
    random = torch.Generator().manual_seed(seed)
    side, faint = (32, 1.0) if segments else (24, 0.4)
    large = F.interpolate(images[:, None], (16, 16), mode="bilinear", align_corners=False)[:, 0]
    count = copies * len(images)
    canvas = torch.zeros(count, side, side)
    classes = torch.full((count, side, side), 10)
    others = torch.randint(len(images), (count,), generator=random)
    contrast = 0.5 + 0.5 * torch.rand(2, count, generator=random)
    places = torch.randint(side - 16 + 1, (2, 2, count), generator=random).tolist()
    for i in range(count):
        for layer, (which, strength) in enumerate(((int(others[i]), faint), (i % len(images), 1))):
            y, x = places[layer][0][i], places[layer][1][i]
            window = (i, slice(y, y + 16), slice(x, x + 16))
            shape = large[which]
            canvas[window] = torch.maximum(canvas[window], strength * contrast[layer, i] * shape)
            classes[window] = torch.where(shape > 0.4, labels[which], classes[window])
    canvas += 0.15 * torch.randn(canvas.shape, generator=random)
    return Pictures(canvas[:, None], classes if segments else labels.repeat(copies), len(images))


def load(name: str) -> nn.Module:
    """Return a trained network in evaluation mode, trained now if no file has it."""
    torch.manual_seed(0)
    model: nn.Module = NETS[name].build()
    if NETS[name].epochs == 0:
        return model
    path = CACHE / f"{name.replace(', ', '-')}.safetensors"
    if path.is_file():
        model.load_state_dict(load_file(path))
    else:
        train(model, material(name).training, NETS[name].epochs, NETS[name].rate)
        save_file(model.state_dict(), path)
    return model.eval()


def train(model: nn.Module, pictures: Pictures, epochs: int, rate: float) -> None:
    """Train by labels, with a rate that rises and falls once."""
    torch.manual_seed(0)
    model.train()
    steps = epochs * (len(pictures.images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(pictures.images)).split(BATCH)[: steps // epochs]:
            loss = F.cross_entropy(model(pictures.images[rows]), pictures.labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()


def fine_tune(
    model: nn.Module, pictures: Pictures, epochs: int, halfway: Callable[[], object]
) -> None:
    """Train a quantized network by labels, with a rate that falls to zero.

    Args:
        model: The network; it ends in training mode.
        pictures: Pictures of the training.
        epochs: Passes over them.
        halfway: Called after half of the steps.
    """
    torch.manual_seed(0)
    model.train()
    batches = [b for _ in range(epochs) for b in torch.randperm(len(pictures.images)).split(BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    for step, rows in enumerate(batches):
        if step == len(batches) // 2:
            halfway()
        loss = F.cross_entropy(model(pictures.images[rows]), pictures.labels[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


@torch.no_grad()
def logits_of(model: Callable[[torch.Tensor], torch.Tensor], pictures: Pictures) -> torch.Tensor:
    """Return the logits of all pictures."""
    return torch.cat([model(x) for x in pictures.images.split(BATCH)])


def scores(logits: torch.Tensor, pictures: Pictures) -> torch.Tensor:
    """Return a score for each digit of the test, (digits,) float64, in percent.

    It is the share of correct pictures, or of pitches within 50 cents. For segmentation it is the
    intersection over union: the share of pixels with the correct digit among those that show a
    digit or are said to show one. Pictures of the same digit are averaged, since their errors
    depend on each other.
    """
    prediction = logits.argmax(1)
    hit = prediction == pictures.labels
    if pictures.labels.is_floating_point():
        each = ((cents(logits) - pictures.labels).abs() < TOLERANCE).double()
    elif hit.dim() == 1:
        each = hit.double()
    else:
        shown = (prediction < 10) | (pictures.labels < 10)
        each = (hit & shown).sum((1, 2)).double() / shown.sum((1, 2))
    return 100 * each.view(-1, pictures.digits).mean(0)


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean of independent values and its standard error."""
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
