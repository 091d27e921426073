"""Images and audio are read from files, or refused with the reason."""

import math
import struct
import wave

import pytest
import torch

from quark.torch.evaluation import media


def write_wave(path, values, width=2, channels=1, rate=8000):
    """A wave file of floats in [-1, 1], as an independent writer makes it."""
    largest = 2 ** (8 * width - 1) - 1
    codes = [round(v * largest) + (128 if width == 1 else 0) for v in values]
    data = b"".join(struct.pack("<i", code)[:width] for code in codes)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_waves_of_any_width(tmp_path, width):
    values = [0.0, 0.5, -0.5, 0.25, -0.75]
    samples = media.read_audio(write_wave(tmp_path / "a.wav", values, width), 8000)
    assert samples.dtype is torch.float32
    torch.testing.assert_close(samples, torch.tensor(values), rtol=0, atol=2.0 / 2 ** (8 * width))


def test_channels_are_mixed(tmp_path):
    path = write_wave(tmp_path / "a.wav", [0.5, -0.5, 0.5, 0.25], channels=2)
    expected = torch.tensor([0.0, 0.375])
    torch.testing.assert_close(media.read_audio(path, 8000), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("rate", [4000, 16000, 11025])
def test_another_rate_keeps_the_tone(tmp_path, rate):
    """A tone of 100 Hz for one second, sampled at the other rate."""
    values = [0.5 * math.sin(2 * math.pi * 100 * k / 8000) for k in range(8000)]
    samples = media.read_audio(write_wave(tmp_path / "a.wav", values), rate)
    expected = 0.5 * torch.sin(2 * math.pi * 100 * torch.arange(rate) / rate)
    torch.testing.assert_close(samples, expected, rtol=0, atol=1e-3)


def test_frequencies_that_the_rate_cannot_hold():
    tone = torch.sin(2 * math.pi * 3000 * torch.arange(8000).double() / 8000)
    assert media.resample(tone, 8000, 4000).abs().max() < 1e-4  # 3000 Hz is above 2000 Hz


def test_damaged_sounds(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no sound"):
        media.read_audio(tmp_path / "none.wav", 8000)
    with pytest.raises(ValueError, match="has no samples"):
        media.read_audio(write_wave(tmp_path / "empty.wav", []), 8000)
    (tmp_path / "bad.flac").write_bytes(b"fLaC nothing")
    monkeypatch.setattr(media, "import_module", missing)
    with pytest.raises(ImportError, match="needs soundfile: pip install soundfile"):
        media.read_audio(tmp_path / "bad.flac", 8000)


def missing(name):
    raise ImportError(name)


def test_images(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.new("L", (5, 3), 7).save(tmp_path / "a.png")
    read = media.read_image(tmp_path / "a.png")
    assert (read.mode, read.size, read.getpixel((0, 0))) == ("RGB", (5, 3), (7, 7, 7))
    data = (tmp_path / "a.png").read_bytes()
    for name, content in {"text": b"no image", "cut": data[: len(data) // 2], "empty": b""}.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.png is no image that can be read"):
            media.read_image(path)
    with pytest.raises(FileNotFoundError, match="there is no image"):
        media.read_image(tmp_path / "none.png")
    monkeypatch.setattr(media, "import_module", missing)
    with pytest.raises(ImportError, match="needs Pillow: pip install pillow"):
        media.read_image(tmp_path / "a.png")


def test_files_of_a_directory(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("z.PNG", "b/a.jpg", "notes.txt", "b/c.wav"):
        (tmp_path / name).write_bytes(b"")
    assert [f.name for f in media.media_files(tmp_path, media.IMAGES)] == ["a.jpg", "z.PNG"]
