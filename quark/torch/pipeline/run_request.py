"""What a run is asked for: a journal belongs to one request."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark import __version__
from quark.torch.graph.float_products import widens_products
from quark.torch.graph.residency import residency_of
from quark.torch.pipeline.statistics import Statistics, digest, model_digests
from quark.torch.quantization.config.config import Config

# Fields of the configuration that change no value of the quantized model.
_WITHOUT_EFFECT = ("export", "log_severity_level")
_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
_HEADER = 1 << 20  # bytes of a file of another kind that its digest covers


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
    tokens = None if statistics is None else digest(sorted(statistics.tokens.items()))
    return {
        "versions": {"quark": __version__, "torch": torch.__version__},
        "devices": sorted({parameter.device.type for parameter in model.parameters()}),
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        # Journals of machines that multiply as torch does have no such entry.
        **({"products": "float32"} if widens_products(model) else {}),
        "configuration": {k: v for k, v in options.items() if k not in _WITHOUT_EFFECT},
        "data": data,
        "statistics": tokens,
        "model": _identify(model),
    }


def _identify(model: nn.Module) -> dict[str, Any]:
    """Return what tells a model from others: its files, or digests of its values."""
    residency: Any = residency_of(model)
    if residency is None or residency.place is None:
        return {"tensors": model_digests(model)}
    return {"files": {path.name: _identify_file(path) for path in _files(residency.place)}}


def _files(place: Path) -> list[Path]:
    """Return the files of a model: its configuration and all that may hold its tensors."""
    if place.is_file():
        return [place]
    return [f for f in sorted(place.iterdir()) if f.suffix in _WEIGHTS or f.name == "config.json"]


def _identify_file(path: Path) -> dict[str, Any]:
    """Return size, time of the last change, and digest of the header."""
    with path.open("rb") as file:
        is_known = path.suffix == ".safetensors"
        size = int.from_bytes(file.read(8), "little") if is_known else _HEADER
        header = hashlib.sha256(file.read(size)).hexdigest()
    stat = path.stat()
    return {"size": stat.st_size, "modified": stat.st_mtime_ns, "header": header}
