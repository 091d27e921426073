"""What a run is asked for: a journal belongs to one request."""

from __future__ import annotations

import hashlib
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
        "configuration": {k: v for k, v in options.items() if k not in _WITHOUT_EFFECT},
        "data": data,
        "statistics": tokens,
        "model": _identify(model),
    }


def _identify(model: nn.Module) -> dict[str, Any]:
    """Return what tells a model from others: its files, or digests of its values."""
    residency: Any = residency_of(model)
    if residency is None or residency.directory is None:
        return {"tensors": model_digests(model)}
    return {"files": {path.name: _identify_file(path) for path in _files(residency.directory)}}


def _files(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.safetensors"), *directory.glob("config.json")])


def _identify_file(path: Path) -> dict[str, Any]:
    """Return size, time of the last change, and digest of the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else None
        header = hashlib.sha256(file.read(size)).hexdigest()
    stat = path.stat()
    return {"size": stat.st_size, "modified": stat.st_mtime_ns, "header": header}
