"""Temporary directories that end with their process, however it ends.

Each has a file that its process locks. The system ends the lock with the process, so a directory
whose file can be locked is one that a killed process left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".in-use"  # file that the process of a directory locks


class TemporaryDirectory:
    """A directory that is removed with this object, at exit, or by the next one after a kill.

    Args:
        prefix: What its name begins with.
        parent: Where it is made; None for the directory of temporary files.

    Attributes:
        path: The directory.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        sweep(parent, prefix)
        self.path, lock = _make(prefix, parent)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)

    def cleanup(self) -> None:
        """Remove the directory with everything inside, as far as the system allows."""
        self._finalizer()


def sweep(parent: Path, prefix: str) -> None:
    """Remove the directories that killed processes of this user left.

    Args:
        parent: Where they lie.
        prefix: What their names begin with.
    """
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError, NotImplementedError, Timeout):  # in use, or no locks on this disk
            if _is_own(path) and (path / LOCK).is_file():
                lock = _lock_of(path)
                lock.acquire(blocking=False)
                _remove(path, lock)


def _make(prefix: str, parent: Path) -> tuple[Path, FileLock]:
    """Return a new directory and its lock, which this process holds if the disk has locks."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock_of(path)
        with suppress(OSError, NotImplementedError):
            lock.acquire()
        # Another process may have swept the directory before it was locked; the lock makes it anew.
        if path.is_dir():
            path.chmod(0o700)
            return path, lock
        lock.release()


def _lock_of(path: Path) -> FileLock:
    # The garbage collector may end an object in another thread than that which made it.
    return FileLock(path / LOCK, thread_local=False)


def _is_own(path: Path) -> bool:
    """Whether a path is a directory of this user: others could put links inside of theirs."""
    if not path.is_dir() or path.is_symlink():
        return False
    # Windows has temporary files for each user.
    return not hasattr(os, "getuid") or path.stat().st_uid == os.getuid()


def _remove(path: Path, lock: FileLock) -> None:
    """Remove a directory and end its lock.

    Windows removes no file that is open or mapped. A directory with such files keeps its lock file,
    so that the next sweep removes it.
    """
    with suppress(OSError):
        for inner in path.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner, ignore_errors=True)
            elif inner.name != LOCK:
                with suppress(OSError):
                    inner.unlink()
    is_empty = path.is_dir() and all(inner.name == LOCK for inner in path.iterdir())
    if is_empty:
        with suppress(OSError):  # Windows removes it after its release alone
            (path / LOCK).unlink(missing_ok=True)
    lock.release(force=True)
    if is_empty:
        with suppress(OSError):
            (path / LOCK).unlink(missing_ok=True)
            path.rmdir()
