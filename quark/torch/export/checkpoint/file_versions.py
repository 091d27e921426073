"""Versions of files: whether those of a checkpoint are replaced while they are read.

Another process may replace a directory between two reads. Each file is sound then, but they belong
to two models. Size and time of the last change tell versions apart on every file system; numbers of
inodes do not, since some network file systems give a file another number each time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

# What a model is made of. Other files, such as logs, may change.
_PATTERNS = ("*config.json", "*.index.json", "*.safetensors", "*.bin", "*.gguf", "*.pth")


class FileVersion(NamedTuple):
    """The size and the time by which two versions of a file differ.

    Attributes:
        size: Its bytes.
        modified: Time of the last change, in nanoseconds.
    """

    size: int
    modified: int


def version_of(file: Path | int) -> FileVersion:
    """Return the version of a file.

    Args:
        file: Its path, or the number of an open file.

    Raises:
        OSError: It cannot be found.
    """
    found = file.stat() if isinstance(file, Path) else os.fstat(file)
    return FileVersion(found.st_size, found.st_mtime_ns)


def check_version(path: Path, expected: FileVersion, file: Path | int | None = None) -> None:
    """Check that a file is the one that was read before.

    Args:
        path: The file.
        expected: Its version then.
        file: Number of the open file, if it is open; else the path tells.

    Raises:
        ValueError: It is gone, or another one.
    """
    try:
        is_same = version_of(path if file is None else file) == expected
    except OSError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"{path} has changed while the checkpoint was read, so its tensors could be those of "
            "two models: wait until nothing writes to it, and start again."
        )


@contextmanager
def unchanged(source: Path) -> Iterator[None]:
    """Check that the files of a checkpoint are the same before and after what is done meanwhile.

    Args:
        source: Directory of the checkpoint, or its file.

    Raises:
        ValueError: A file has changed, or is gone. It takes the place of another ``ValueError``,
            which a mixture of two checkpoints may cause.
    """
    before = _versions_of(source)
    try:
        yield
    except ValueError as error:
        _check_versions(before, error)
        raise
    _check_versions(before)


def _versions_of(source: Path) -> dict[Path, FileVersion]:
    """Return the versions of the files of a model that are there; none if there is no model."""
    versions: dict[Path, FileVersion] = {}
    try:
        files = list(source.iterdir()) if source.is_dir() else [source]
        for path in files:
            if any(fnmatchcase(path.name, pattern) for pattern in _PATTERNS) and path.is_file():
                versions[path] = version_of(path)
    except OSError:
        pass  # who opens the files tells what is wrong
    return versions


def _check_versions(versions: Mapping[Path, FileVersion], cause: ValueError | None = None) -> None:
    for path, version in versions.items():
        try:
            check_version(path, version)
        except ValueError as error:
            raise error from cause
