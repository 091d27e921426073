"""Writing files safely, in a temporary directory that is renamed; reading JSON strictly."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

# Called with the number of bytes that will be written, opens the directory to write them to.
Target = Callable[[int], AbstractContextManager[Path]]


@contextmanager
def fresh_directory(path: str | Path, overwrite: bool = False, needed: int = 0) -> Iterator[Path]:
    """Open a temporary directory to write to; it replaces ``path`` if no error is raised.

    Args:
        path: Path of the directory. Missing parents are created.
        overwrite: Whether an existing, non-empty directory may be replaced.
        needed: Bytes that will be written.

    Raises:
        FileExistsError: The directory exists and is not empty.
        OSError: The disk has less room than needed.
    """
    target = Path(path).resolve()
    check_vacant(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(
            f"{target.parent} has {free / 1e9:.2f} GB free, but {needed / 1e9:.2f} GB will be "
            "written: make room, or choose another directory."
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        _grant_default_modes(partial)
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_vacant(path: str | Path, overwrite: bool = False) -> None:
    """Check that ``path`` does not hold anything that must not be replaced.

    Raises:
        FileExistsError: It is a file, or a directory that is not empty.
    """
    target = Path(path)
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() and not (overwrite and target.is_dir()):
        raise FileExistsError(
            f"{target} already exists: choose another directory, remove it, or pass overwrite=True."
        )


def _grant_default_modes(directory: Path) -> None:
    """Give the default permissions of new files, which temporary ones do not have."""
    probe = directory / ".probe"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for file in directory.iterdir():
        file.chmod(mode)
    directory.chmod(mode | (mode & 0o444) >> 2)


def _replace(partial: Path, target: Path) -> None:
    """Move ``partial`` to ``target``; an older directory is removed after the move."""
    if not target.exists():
        partial.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    target.rename(old / target.name)
    try:
        partial.rename(target)
    except BaseException:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read a JSON file.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is not JSON, or an object has a name twice.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    return parse_json(Path(path).read_bytes(), path)


def parse_json(data: bytes, path: str | Path) -> Any:
    """Parse the content of a JSON file.

    Args:
        data: Content of the file.
        path: Name of the file, for the error message.

    Raises:
        ValueError: ``data`` is not JSON, or an object has a name twice.
    """
    try:
        return json.loads(data, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return data


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
