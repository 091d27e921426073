"""Replacement of a directory in one step, and recovery after a process was killed meanwhile.

While ``out`` is written, these lie beside it:

    .out.lock              held by the process that writes, released by the system if it dies
    .out.partial-abcd1234  the new directory, until it is complete
    .out.old-abcd1234      the old directory, between two renames

The next run finds the lock free and removes what is left; an old directory without a successor is
put back.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from quark.torch.interruption import raise_interrupt

_RENAME_EXCHANGE = 2  # flag of renameat2
_AT_FDCWD = -100  # paths are relative to the working directory


@contextmanager
def hold(target: Path) -> Iterator[None]:
    """Own a directory that will be written, and remove what killed processes left beside it.

    Args:
        target: Resolved path of the directory; its parent exists.

    Raises:
        FileExistsError: Another process writes to it.
        OSError: Nothing can be written beside it.
    """
    path = target.with_name(f".{target.name}.lock")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileExistsError(
            f"Another process is writing to {target}: wait for it, or choose another directory. If "
            f"there is none, remove {path}."
        ) from None
    try:
        _recover(target)
        yield
    finally:
        # Removed while it is held, so that no other process holds a file that has no name. Windows
        # does not allow that, and removes it afterwards.
        with suppress(OSError):
            path.unlink()
        lock.release()
        with suppress(OSError):
            path.unlink(missing_ok=True)


def recover(target: Path) -> None:
    """Remove what killed processes left beside a directory; put an old directory back.

    Does nothing if another process writes to the directory.

    Args:
        target: Resolved path of the directory.
    """
    if any(_leftovers(target)):
        with suppress(OSError), hold(target):
            pass


def partial_directory(target: Path) -> Path:
    """Make an empty directory beside a target, and return it."""
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))


def place(partial: Path, target: Path) -> None:
    """Move a complete directory to its target, after its files are on the disk.

    At every moment there is either the old or the new directory. An old directory then lies at
    ``partial``, or is removed.

    Raises:
        KeyboardInterrupt: The user interrupted the work; see ``interruption``.
    """
    _sync(partial)
    raise_interrupt()
    if not target.exists():
        partial.rename(target)
    elif not _exchange(partial, target):
        _rename_twice(partial, target)
    sync_directory(target.parent)


def _rename_twice(partial: Path, target: Path) -> None:
    """Replace a directory where the system cannot exchange two; ``_recover`` undoes half of it."""
    old = target.with_name(partial.name.replace(".partial-", ".old-"))
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two directories in one step; return whether the system can."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    failed: int = rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    return not failed


def _leftovers(target: Path) -> list[Path]:
    """Return partial and old directories beside a target, in the spelling of ``mkdtemp``."""
    name = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-[a-z0-9_]{{8}}")
    if not target.parent.is_dir():
        return []
    paths = (path for path in target.parent.iterdir() if name.fullmatch(path.name))
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _recover(target: Path) -> None:
    leftovers = _leftovers(target)
    old = [path for path in leftovers if path.name.startswith(f".{target.name}.old-")]
    if old and not target.exists():
        max(old, key=lambda path: path.stat().st_mtime).rename(target)
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)


def _sync(directory: Path) -> None:
    """Write a directory with everything below it from the memory of the system to the disk."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            sync_file(Path(parent) / name)
        sync_directory(Path(parent))


def sync_file(path: Path) -> None:
    """Write a file from the memory of the system to the disk."""
    # Windows flushes only files that are open for writing.
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to the disk; Windows cannot, and needs not."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems of networks do not offer it
            os.fsync(handle)
    finally:
        os.close(handle)
