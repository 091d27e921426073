"""Small networks and their data: trained once on composed pictures, or shipped by packages.

``load(name)`` trains a network deterministically, in a minute or two, and stores it in
``build/vision``; later calls read the file. ``material(name)`` returns its pictures, and
``material(name, draw)`` the same with other pictures for calibration. The digits are
those of scikit-learn, 1797 of 8 by 8 values: 1200 for training and calibration, 597 for the test.
``packaged_nets.py`` has the networks that are trained already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from packaged_nets import TOLERANCE, cents, faces, load_crepe, load_mtcnn, load_vad, notes, voices
from safetensors.torch import load_file, save_file
from torch import nn
from vision_models import Detector, Segmenter, Transformer, mobilenet, resnet, spread_mobilenet

CACHE = Path(__file__).resolve().parent.parent / "build" / "vision"
DIGITS = CACHE / "digits.safetensors"
TRAINING, TEST = 1200, 597  # digits
COPIES = 8  # pictures of each digit of the training
TEST_COPIES = 4
CALIBRATION = 256  # pictures
BATCH = 64
CELL = 4  # pixels of a side of a cell of the detector


@dataclass
class Pictures:
    """Pictures and what they show, or sounds.

    Attributes:
        images: (pictures, channels, height, width); sounds: frames or spectra.
        labels: (pictures,) classes, or (pictures, height, width) classes of pixels or cells: 0 to 9
            the digit, 10 none. For notes, (frames,) pitches in cents, float64.
        digits: Number of digits that the pictures were made of; picture i shows digit i % digits.
            Without digits, the number of pictures.
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


@dataclass(frozen=True)
class Net:
    """A network, its data and how it is trained.

    Attributes:
        build: Returns the network.
        material: Returns its data.
        epochs: Passes over the pictures of the training; 0 for a network that is trained already.
        rate: Largest learning rate.
    """

    build: Callable[[], nn.Module]
    material: Callable[[], Material]
    epochs: int = 0
    rate: float = 0.0


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


def material(name: str, draw: int = 0) -> Material:
    """Return the data of a network.

    Args:
        name: Name of the network.
        draw: Number of a random draw of the pictures for calibration; 0 for the first ones. A
            network of a package has seen no picture, so its draws are from all of them, and the
            others are the test.
    """
    data = NETS[name].material()
    if draw == 0:
        return data
    trained = NETS[name].epochs > 0
    parts = (data.training,) if trained else (data.training, data.test)
    images, labels = (torch.cat([getattr(p, k) for p in parts]) for k in ("images", "labels"))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100 + draw))
    if trained:
        drawn = Pictures(images[order], labels[order], len(order))
        return Material(drawn, data.test)
    return divided(images[order], labels[order], len(data.training.images))


def composed(task: str = "classes") -> Material:
    """Return composed pictures; see ``compose`` for the tasks."""
    images, labels = digits()
    return Material(
        compose(images[:TRAINING], labels[:TRAINING], COPIES, task, seed=1),
        compose(images[TRAINING:], labels[TRAINING:], TEST_COPIES, task, seed=2),
    )


def generated(
    make: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]], calibration: int, test: int
) -> Material:
    """Return data for calibration and test from a function of a count and a seed."""
    return Material(*(Pictures(*make(n, seed), n) for n, seed in ((calibration, 1), (test, 2))))


def divided(images: torch.Tensor, labels: torch.Tensor, calibration: int) -> Material:
    """Return the first pictures for calibration, the others for the test."""
    parts = (slice(calibration), slice(calibration, len(images)))
    return Material(*(Pictures(images[p], labels[p], len(images[p])) for p in parts))


def compose(
    images: torch.Tensor, labels: torch.Tensor, copies: int, task: str, seed: int
) -> Pictures:
    """Return pictures that show each digit ``copies`` times, at random places, in noise.

    ``classes``: a canvas of 24 by 24 shows a digit of 16 by 16, and a faint one behind it.
    ``pixels``, ``centers``: a canvas of 32 by 32 shows two, of which one may cover the other; the
    labels are the classes of pixels, or of cells, by the centers of the digits in them.
    """
    random = torch.Generator().manual_seed(seed)
    side, faint = (24, 0.4) if task == "classes" else (32, 1.0)
    large = F.interpolate(images[:, None], (16, 16), mode="bilinear", align_corners=False)[:, 0]
    count = copies * len(images)
    canvas = torch.zeros(count, side, side)
    pixels = torch.full((count, side, side), 10)
    cells = torch.full((count, side // CELL, side // CELL), 10)
    others = torch.randint(len(images), (count,), generator=random)
    contrast = 0.5 + 0.5 * torch.rand(2, count, generator=random)
    places = torch.randint(side - 16 + 1, (2, 2, count), generator=random).tolist()
    for i in range(count):
        for layer, (which, strength) in enumerate(((int(others[i]), faint), (i % len(images), 1))):
            y, x = places[layer][0][i], places[layer][1][i]
            window = (i, slice(y, y + 16), slice(x, x + 16))
            shape = large[which]
            canvas[window] = torch.maximum(canvas[window], strength * contrast[layer, i] * shape)
            pixels[window] = torch.where(shape > 0.4, labels[which], pixels[window])
            cells[i, (y + 8) // CELL, (x + 8) // CELL] = labels[which]
    canvas += 0.15 * torch.randn(canvas.shape, generator=random)
    shown = {"classes": labels.repeat(copies), "pixels": pixels, "centers": cells}[task]
    return Pictures(canvas[:, None], shown, len(images))


NETS = {
    "resnet": Net(resnet, composed, 6, 4e-3),
    "mobilenet": Net(mobilenet, composed, 8, 6e-3),
    "mobilenet, spread": Net(spread_mobilenet, composed, 8, 6e-3),
    "transformer": Net(Transformer, composed, 16, 2e-3),
    "segmenter": Net(Segmenter, partial(composed, "pixels"), 5, 6e-3),
    "detector": Net(Detector, partial(composed, "centers"), 8, 6e-3),
    "crepe, tiny": Net(partial(load_crepe, "tiny"), partial(generated, notes, CALIBRATION, 800)),
    "crepe, full": Net(partial(load_crepe, "full"), partial(generated, notes, BATCH, 256)),
    "vad": Net(load_vad, partial(generated, voices, CALIBRATION, 800)),
    **{
        f"mtcnn, {name}": Net(partial(load_mtcnn, name), lambda s=side: divided(*faces(s), BATCH))
        for name, side in (("p", 12), ("r", 24), ("o", 48))
    },
}


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

    It is the share of correct pictures, or of pitches within 50 cents. For pixels and cells it is
    the intersection over union: the share with the correct digit among those that show a digit or
    are said to show one. Pictures of the same digit are averaged, since their errors depend on
    each other.
    """
    prediction = logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()
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
