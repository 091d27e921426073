"""Recognition of directories that this package wrote, which are all that it replaces."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quark.torch.digests import DIGESTS

# Files that come with weights: written by Transformers, or copied from the model.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.*",
    "additional_chat_templates",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "processing_*.py",
    DIGESTS,
)
# Name of a file -> names of the files that are written with it, without companions.
_WEIGHTS = {
    "config.json": (
        "model.safetensors",
        "model-?????-of-?????.safetensors",
        "model.safetensors.index.json",
        "hf_quant_config.json",
    ),
    "model_state_dict.pth": ("model_state_dict.pth",),
    "*_quantized.pth": ("*_quantized.pth",),
    "*.gguf": ("*.gguf",),
    "quark_model.onnx": ("quark_model.onnx", "quark_model.onnx.data"),
    "statistics.json": ("statistics.json", "statistics.safetensors"),
    "model_index.json": ("model_index.json",),  # a pipeline; its components are listed with digests
}
_HEAD = 1 << 16  # bytes of a GGUF file that are searched
WRITER = "Quark"  # general.quantized_by of GGUF files


def foreign_names(directory: Path) -> list[str]:
    """Return the names in a directory that are not those of an earlier output, sorted.

    An output is known by a file that only this package writes, or a quantized checkpoint has:
    ``config.json`` with a ``quantization_config``, ``model_state_dict.pth``, ``statistics.json``
    and so on. Without such a file, all names are foreign: a float model is not replaced.

    Args:
        directory: A directory.
    """
    present = sorted(path.name for path in directory.iterdir())
    written = {pattern for names in _outputs(directory) for pattern in names}
    if not written:
        return present
    written |= {*_COMPANIONS, *_listed(directory / DIGESTS)}
    return [name for name in present if not any(fnmatch(name, known) for known in written)]


def _outputs(directory: Path) -> Iterator[tuple[str, ...]]:
    """Iterate over the names that each output in a directory has."""
    for pattern, names in _WEIGHTS.items():
        sign = _SIGNS.get(pattern)
        paths = list(directory.glob(pattern))
        if paths and all(path.is_file() and (sign is None or sign(path)) for path in paths):
            yield names
    for path in directory.glob("*.json"):  # parameters: <type of model>.json, .safetensors
        if isinstance(_read(path).get("structure"), dict):
            yield path.name, f"{path.stem}.safetensors"


def _has_section(path: Path) -> bool:
    return isinstance(_read(path).get("quantization_config"), dict)


def _has_layout(path: Path) -> bool:
    return "layout" in _read(path)


def _has_quantized_component(path: Path) -> bool:
    return any(map(_has_section, path.parent.glob("*/config.json")))


def _names_writer(path: Path) -> bool:
    with path.open("rb") as file:
        name = WRITER.encode()
        return b"general.quantized_by" + struct.pack("<IQ", 8, len(name)) + name in file.read(_HEAD)


# Whether a file of these names shows that this package wrote it; other names show it themselves.
_SIGNS: dict[str, Callable[[Path], bool]] = {
    "config.json": _has_section,
    "statistics.json": _has_layout,
    "model_index.json": _has_quantized_component,
    "*.gguf": _names_writer,
}


def _listed(path: Path) -> set[str]:
    """Return the names in a list of digests: lines of a digest, two characters and a name."""
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return {line[66:].split("/")[0] for line in lines if len(line) > 66}


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, {} if it holds none."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
