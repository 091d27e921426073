"""Images and audio from files."""

from __future__ import annotations

import wave
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
AUDIO = (".wav", ".flac", ".ogg", ".mp3")


def media_files(directory: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of some types in a directory and those below it, in order of their names."""
    files = (file for file in directory.rglob("*") if file.suffix.lower() in suffixes)
    return sorted(file for file in files if file.is_file())


def read_image(path: Path) -> Any:
    """Return an image as a ``PIL.Image`` in RGB.

    Raises:
        FileNotFoundError: There is no file.
        ImportError: Pillow is missing.
        ValueError: The file is no image that Pillow reads.
    """
    try:
        image: Any = import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(f"reading {path} needs Pillow: pip install pillow") from error
    _check_exists(path, "image")
    try:
        with image.open(path) as opened:
            return opened.convert("RGB")
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no image that can be read: {error}") from None


def read_audio(path: Path, rate: int) -> torch.Tensor:
    """Return the samples of a sound, mixed to one channel.

    Wave files of integers are read without any package, others with soundfile.

    Args:
        path: The file.
        rate: Samples per second of the result.

    Returns:
        (samples,) float32 in [-1, 1].

    Raises:
        FileNotFoundError: There is no file.
        ImportError: soundfile is needed and missing.
        ValueError: The file is no sound that can be read, or is empty.
    """
    _check_exists(path, "sound")
    try:
        samples, own_rate = _read_wave(path)
    except (wave.Error, EOFError):
        samples, own_rate = _read_with_soundfile(path)
    if not samples.numel():
        raise ValueError(f"{path} has no samples")
    return resample(samples.mean(1), own_rate, rate)


def resample(samples: torch.Tensor, rate: int, new_rate: int) -> torch.Tensor:
    """Return a sound at another rate, limited to the frequencies that both rates can hold.

    Args:
        samples: (samples,).
        rate: Samples per second.
        new_rate: Samples per second of the result.
    """
    if rate == new_rate:
        return samples
    count = max(1, round(len(samples) * new_rate / rate))
    spectrum = torch.fft.rfft(samples.double())
    resized = torch.zeros(count // 2 + 1, dtype=spectrum.dtype, device="cpu")
    kept = min(len(spectrum), len(resized))
    resized[:kept] = spectrum[:kept]
    values: torch.Tensor = torch.fft.irfft(resized, count) * (count / len(samples))
    return values.to(samples.dtype)


def _check_exists(path: Path, what: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {what} {path}")


def _read_wave(path: Path) -> tuple[torch.Tensor, int]:
    """Return (samples, channels) in [-1, 1], and the samples per second."""
    with wave.open(str(path), "rb") as file:
        data = bytearray(file.readframes(file.getnframes()))
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
    if not data:
        return torch.zeros(0, channels, dtype=torch.float32, device="cpu"), rate
    octets = torch.frombuffer(data, dtype=torch.uint8).view(-1, width).long()
    if width == 1:  # unsigned, unlike wider ones
        values = octets[:, 0] - 128
    else:
        values = (octets << 8 * torch.arange(width, device="cpu")).sum(1)  # the lowest byte first
        values = torch.where(values >= 1 << (8 * width - 1), values - (1 << 8 * width), values)
    return (values / float(1 << (8 * width - 1))).float().view(-1, channels), rate


def _read_with_soundfile(path: Path) -> tuple[torch.Tensor, int]:
    try:
        soundfile: Any = import_module("soundfile")
    except (ImportError, OSError) as error:  # OSError: its library is missing
        raise ImportError(
            f"reading {path} needs soundfile: pip install soundfile. Wave files of integers need "
            "nothing"
        ) from error
    try:
        values, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{path} is no sound that can be read: {error}") from None
    return torch.from_numpy(values), int(rate)
