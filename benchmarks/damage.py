"""Damage of files: values of JSON, bytes, tensors and their headers, at random."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HOSTILE: list[Any] = [
    None, True, 0, -1, -128, 7, 1 << 31, 10**30, 0.5, float("nan"), "", "x", "../x", "/etc/passwd",
    [], [[]], [None], ["re:(a|b)+$"], {}, {"a": 1}, {"0": {}}, "int4", "fp8_e4m3", "per_group", 128,
]  # fmt: skip
TENSORS = (".safetensors", ".pth")
# Types of the same width, as which the same bytes are other numbers.
RETYPED = {
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float64: torch.int64,
    torch.int64: torch.float64,
}
TENSOR_DAMAGES = ("missing", "renamed", "retyped", "reshaped", "truncated")
DAMAGES = ("file", "tensor", "data")


def change_json(data: Any, chance: random.Random) -> Any:
    """Return JSON with one value somewhere in it replaced, removed or renamed."""
    places: list[tuple[Any, Any]] = []

    def visit(part: Any) -> None:
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(inner, (dict, list)):
                visit(inner)

    visit(data)
    holder, key = chance.choice(places)
    if chance.random() < 0.2:
        del holder[key]
    elif chance.random() < 0.1 and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    else:
        holder[key] = chance.choice(HOSTILE)
    return data


def change_bytes(data: bytearray, chance: random.Random) -> bytearray:
    """Return a file cut, grown, or with some of its first bytes or numbers changed."""
    kind, early = chance.random(), min(len(data), chance.choice([16, 256, 4096, len(data)]))
    at = chance.randrange(max(early, 1))
    if kind < 0.2:
        return data[:at]
    if kind < 0.3:
        return data + bytes(chance.randrange(64))
    if kind < 0.6 and at + 8 <= len(data):
        huge = chance.choice([0, 1, 255, 1 << 20, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
        struct.pack_into("<Q", data, at, huge)
        return data
    for _ in range(chance.choice([1, 1, 4, 64])):
        data[chance.randrange(early)] = chance.randrange(256)
    return data


def damage_file(directory: Path, chance: random.Random) -> str:
    """Change the JSON or the bytes of one file, or remove it; return its name."""
    unused = ("generation_config.json", "SHA256SUMS")
    file = chance.choice(sorted(f for f in directory.iterdir() if f.name not in unused))
    if file.suffix == ".json" and chance.random() < 0.85:
        sound = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(change_json(sound, chance)))
    elif chance.random() < 0.05:
        file.unlink()
    else:
        file.write_bytes(change_bytes(bytearray(file.read_bytes()), chance))
    return file.name


def damage_tensor(directory: Path, chance: random.Random, what: str | None = None) -> str:
    """Damage one tensor of a checkpoint, in files that are sound; return what was done to which.

    Args:
        directory: The checkpoint.
        chance: Random numbers.
        what: One of ``TENSOR_DAMAGES``, by default any.
    """
    file = chance.choice(sorted(f for f in directory.iterdir() if f.suffix in TENSORS))
    is_native = file.suffix == ".pth"
    tensors = torch.load(file, weights_only=True) if is_native else load_file(file)
    name, what = chance.choice(sorted(tensors)), what or chance.choice(TENSOR_DAMAGES)
    tensor = tensors.pop(name)
    if what == "renamed":
        tensors[f"{name}_"] = tensor
    elif what == "retyped":
        tensors[name] = tensor.view(RETYPED[tensor.dtype])
    elif what == "reshaped":
        tensors[name] = tensor.reshape(1, 1, -1) if tensor.dim() != 1 else tensor.reshape(-1, 1)
    elif what == "truncated":
        tensors[name] = tensor.flatten()[:-1].clone()
    if is_native:
        torch.save(tensors, file)
    else:
        save_file(tensors, file, metadata={"format": "pt"})
    return f"{what} {name}"


def damage_data(directory: Path, chance: random.Random) -> str:
    """Change one bit of the largest files, anywhere; return the name of the file."""
    sizes = {f: f.stat().st_size for f in directory.iterdir() if f.suffix not in (".json", "")}
    file = chance.choice(sorted(sizes))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return file.name
