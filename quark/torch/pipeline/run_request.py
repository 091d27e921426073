"""What a run is asked for: a journal belongs to one request."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.statistics import Statistics, digest, model_digests
from quark.torch.quantization.config.config import Config

# Fields of the configuration that change no value of the quantized model.
_WITHOUT_EFFECT = ("export", "log_severity_level")
_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
_HEADER = 1 << 20  # bytes of a file of another kind that its digest covers
_PIECES, _PIECE = 64, 4096  # pieces of a file that its sample has, and bytes of each


def describe_run(
    model: nn.Module, config: Config, data: str | None, statistics: Statistics | None
) -> dict[str, Any]:
    """Return what a run is asked for, in types of JSON.

    Args:
        model: The float model.
        config: How to quantize it.
        data: Digest of the data, None without.
        statistics: Statistics of the model, or None.
    """
    options = config.to_dict(everything=True)
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    tokens = None if statistics is None else digest(sorted(statistics.tokens.items()))
    return {
        "versions": {"quark": __version__, "torch": torch.__version__},
        "devices": devices,
        "threads": thread_count(devices),
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "configuration": {k: v for k, v in options.items() if k not in _WITHOUT_EFFECT},
        "data": data,
        "statistics": tokens,
        "model": _identify(model),
    }


def thread_count(devices: Collection[str]) -> int | None:
    """Return the number of threads, by which products on a CPU round; None on other devices."""
    return torch.get_num_threads() if "cpu" in devices else None


def _identify(model: nn.Module) -> dict[str, Any]:
    """Return what tells a model from others: its files, or digests of its values."""
    files = model_files(model)
    if files is None:
        return {"tensors": model_digests(model)}
    times = {path.name: path.stat().st_mtime_ns for path in files}
    return {"files": {n: {"modified": times[n], **x} for n, x in identify_files(files).items()}}


def model_files(model: nn.Module) -> list[Path] | None:
    """Return the files of a model that is read when it is used; None for another one.

    These are its configuration and all that may hold its tensors.
    """
    residency: Any = residency_of(model)
    place: Path | None = None if residency is None else residency.place
    if place is None:
        return None
    if place.is_file():
        return [place]
    return [f for f in sorted(place.iterdir()) if f.suffix in _WEIGHTS or f.name == "config.json"]


def identify_files(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return size, digest of the header and digest of a sample of each file, by its name."""
    return {path.name: _identify_file(path) for path in files}


def _identify_file(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        is_known = path.suffix == ".safetensors"
        length = int.from_bytes(file.read(8), "little") if is_known else _HEADER
        header = hashlib.sha256(file.read(length))
        sample = hashlib.sha256()
        for number in range(_PIECES):  # the first one is the start of the file, the last its end
            file.seek(max(size - _PIECE, 0) * number // (_PIECES - 1))
            sample.update(file.read(_PIECE))
    return {"size": size, "header": header.hexdigest(), "sample": sample.hexdigest()}
