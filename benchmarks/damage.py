"""Damage of files: values of JSON, bytes, tensors and their headers, at random."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HOSTILE: list[Any] = [
    None, True, 0, -1, -128, 7, 1 << 31, 10**30, 0.5, float("nan"), "", "x", "../x", "/etc/passwd",
    [], [[]], [None], ["re:(a|b)+$"], {}, {"a": 1}, {"0": {}}, "int4", "fp8_e4m3", "per_group", 128,
]  # fmt: skip
ARCHIVES = ("_quantized.pth", ".pt2")  # of graphs
UNUSED = ("generation_config.json", "SHA256SUMS", "lock")
# Numbers that no scale is, and the largest and smallest ones.
NUMBERS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e38, 6e4, 1e-45, 1e-6)
# Types of the same width, as which the same bytes are other numbers.
RETYPED = {
    torch.float32: torch.int32,
    torch.int32: torch.float32,
    torch.uint32: torch.float32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float64: torch.int64,
    torch.int64: torch.float64,
}
TENSOR_DAMAGES = ("missing", "renamed", "retyped", "reshaped", "truncated")
KEPT = ", but its values"  # after the name of a file whose description alone is damaged
DAMAGES = ("file", "tensor", "values", "data")


def files_of(directory: Path) -> list[Path]:
    """Return the files of a directory that a door reads."""
    return sorted(f for f in directory.rglob("*") if f.is_file() and f.name not in UNUSED)


def tensor_files(directory: Path) -> list[Path]:
    """Return the files that hold tensors by name."""
    kinds = (".safetensors", ".pth")
    files = (f for f in files_of(directory) if not f.name.endswith(ARCHIVES))
    return [f for f in files if f.suffix in kinds]


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
    """Change the JSON, the bytes or a member of one file, or remove it; return its name.

    ``KEPT`` follows the name of a safetensors file whose tensors still have their bytes, or that
    has another length: only the sound result is right then.
    """
    file = chance.choice(files_of(directory))
    if file.suffix == ".json" and chance.random() < 0.85:
        sound = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(change_json(sound, chance)))
    elif zipfile.is_zipfile(file) and chance.random() < 0.8:
        return f"{file.name}, {change_member(file, chance)}"
    elif chance.random() < 0.05:
        file.unlink()
    else:
        sound = file.read_bytes()
        damaged = change_bytes(bytearray(sound), chance)
        file.write_bytes(damaged)
        if file.suffix == ".safetensors" and keeps_values(sound, damaged):
            return f"{file.name}{KEPT}"
    return file.name


def keeps_values(sound: bytes, damaged: bytearray) -> bool:
    """Whether a damaged safetensors file has the bytes of its tensors, or another length."""
    start = 8 + int.from_bytes(sound[:8], "little")
    return len(damaged) != len(sound) or damaged[start:] == sound[start:]


def change_member(file: Path, chance: random.Random) -> str:
    """Change the JSON or the bytes of one member of an archive, or remove it; return its name."""
    with zipfile.ZipFile(file) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    name = chance.choice(sorted(members))
    if name.endswith(".json") and chance.random() < 0.9:
        members[name] = json.dumps(change_json(json.loads(members[name]), chance)).encode()
    elif chance.random() < 0.1:
        del members[name]
    else:
        members[name] = bytes(change_bytes(bytearray(members[name]), chance))
    is_packed = chance.random() < 0.05
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED if is_packed else 0) as target:
        for each, data in members.items():
            target.writestr(each, data)
    file.write_bytes(content.getvalue())
    return name


def damage_tensor(directory: Path, chance: random.Random, what: str | None = None) -> str:
    """Damage one tensor of a checkpoint, in files that are sound; return what was done to which.

    Args:
        directory: The checkpoint.
        chance: Random numbers.
        what: One of ``TENSOR_DAMAGES``, by default any.
    """
    file = chance.choice(tensor_files(directory))
    tensors = read_tensors(file)
    if not tensors:
        file.unlink()
        return f"removed {file.name}"
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
    write_tensors(file, tensors)
    return f"{what} {name}"


def damage_values(directory: Path, chance: random.Random) -> str:
    """Change one number of a tensor of floats, often a scale; return what was done to which."""
    file = chance.choice(tensor_files(directory))
    tensors = read_tensors(file)
    floats = sorted(n for n, t in tensors.items() if t.is_floating_point() and t.numel())
    scales = [name for name in floats if "scale" in name]
    if not floats:
        return "nothing"
    name = chance.choice(scales if scales and chance.random() < 0.8 else floats)
    values, number = tensors[name].float().flatten(), chance.choice(NUMBERS)
    values[chance.randrange(len(values))] = number
    tensors[name] = values.reshape(tensors[name].shape).to(tensors[name].dtype)
    write_tensors(file, tensors)
    return f"{number} in {name}"


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file."""
    is_native = file.suffix == ".pth"
    tensors: dict[str, torch.Tensor]
    tensors = torch.load(file, weights_only=True) if is_native else load_file(file)
    return tensors


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors in the place of those of a file, under the texts of its header."""
    if file.suffix == ".pth":
        torch.save(tensors, file)
        return
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, file, metadata=metadata)


def damage_data(directory: Path, chance: random.Random) -> str:
    """Change one bit of the largest files, anywhere; return the name of the file."""
    file = chance.choice([f for f in files_of(directory) if f.suffix not in (".json", "")])
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return file.name
