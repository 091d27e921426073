"""Writing files safely, in a temporary directory that is renamed; reading JSON strictly."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.torch.digests import write_digests
from quark.torch.earlier_output import foreign_names
from quark.torch.replacement import hold, partial_directory, place, recover

if TYPE_CHECKING:
    import torch


logger = logging.getLogger("quark")

# Called with the number of bytes that will be written, opens the directory to write them to.
Target = Callable[[int], AbstractContextManager[Path]]


@contextmanager
def fresh_directory(
    path: str | Path,
    overwrite: bool = False,
    needed: int = 0,
    announce: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """Open a temporary directory to write to; it replaces ``path`` if no error is raised.

    Digests of its files are written to it; see ``digests``. The old directory stays until the new
    one is on the disk, and both are exchanged in one step where the system can do that. What a
    killed process left is removed or put back.

    Args:
        path: Path of the directory. Missing parents are created.
        overwrite: Whether a directory with an earlier output may be replaced.
        needed: Bytes that will be written.
        announce: Called with the temporary directory when it is complete, before it takes its
            place.

    Raises:
        FileExistsError: The directory holds something that must not be replaced, or another
            process writes to it.
        OSError: The disk has less room than needed, or nothing can be written there.
    """
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with hold(target):
        _check_replaceable(target, overwrite)
        check_space(target, needed)
        partial = partial_directory(target)
        try:
            yield partial
            write_digests(partial)
            _grant_default_modes(partial)
            if announce is not None:
                announce(partial)
            place(partial, target)
        finally:
            _remove(partial)


def _remove(directory: Path) -> None:
    """Remove a directory, and warn if that fails: its error must not hide that of the work."""
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        logger.warning("%s cannot be removed. Remove it by hand.", directory)


def check_vacant(path: str | Path, overwrite: bool = False) -> None:
    """Check that ``path`` can be written, and does not hold anything that must not be replaced.

    Raises:
        FileExistsError: It is a file or a mount point, or a directory that is not empty; with
            ``overwrite``, a directory with files that no earlier output has.
        OSError: Nothing can be written there, or the name is too long for the names of temporary
            directories that are made of it.
    """
    target = Path(path).resolve()
    recover(target)
    _check_replaceable(target, overwrite)
    parent = next(p for p in target.parents if p.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.probing-", dir=parent):
            pass
    except OSError as error:
        raise _refusal(parent, error) from None
    if target.is_dir():  # it is replaced, and its files are removed
        try:
            with tempfile.TemporaryFile(dir=target):
                pass
        except OSError as error:
            raise _refusal(target, error) from None


def _refusal(directory: Path, error: OSError) -> OSError:
    return type(error)(
        f"nothing can be written to {directory} ({error.strerror}). Choose another directory."
    )


def check_space(path: str | Path, needed: int) -> None:
    """Check that the disk of a directory, which may not exist yet, has room.

    Args:
        path: The directory.
        needed: Bytes that will be written.

    Raises:
        OSError: There is less.
    """
    parent = next(p for p in Path(path).resolve().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(
            f"{parent} has {_size_text(free)} free, but {_size_text(needed)} will be "
            "written: make room, or choose another directory."
        )


def _size_text(count: int) -> str:
    """Return a number of bytes in the largest unit that fits: 912 kB, 8.2 GB."""
    unit, name = next(((u, n) for u, n in _UNITS if count >= u), _UNITS[-1])
    return f"{count / unit:.1f} {name}".replace(".0 ", " ")


_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if os.path.ismount(target):
        raise FileExistsError(
            f"{target} is a mount point, which cannot be replaced: choose a directory in it."
        )
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file: choose another name, or remove it.")
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} already exists: choose another directory, remove it, or pass overwrite=True."
        )
    foreign = foreign_names(target) if target.exists() else []
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:3])}{more}, not only an earlier output of this "
            "package, which is all that is replaced: choose another directory, or move these "
            "files."
        )


def check_new_file(path: str | Path, overwrite: bool = False) -> None:
    """Check that a file can be written.

    Raises:
        FileExistsError: It exists, and must not be replaced.
        FileNotFoundError: Its directory does not exist.
        OSError: Nothing can be written there.
    """
    path = Path(path)
    if path.is_dir():
        raise FileExistsError(f"{path} is a directory. Give the name of a file in it.")
    if path.exists() and not (path.is_file() and overwrite):
        raise FileExistsError(f"{path} exists. Choose another name, or give --overwrite.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}. Make it first.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise type(error)(f"nothing can be written to {path.parent} ({error.strerror}).") from None


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8 under a temporary name, and rename it when it is on the disk."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _grant_default_modes(directory: Path) -> None:
    """Give the default permissions of new files, which temporary ones do not have."""
    probe = directory / ".probe"
    probe.touch()
    mode = probe.stat().st_mode & 0o666
    probe.unlink()
    for file in directory.iterdir():
        if file.is_file():
            file.chmod(mode)
    directory.chmod(mode | (mode & 0o444) >> 2)


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file for people to read."""
    write_text(path, json.dumps(data, indent=2) + "\n")


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
        raise ValueError(
            f"{path} is not valid JSON ({error}): mend it, or copy it again."
        ) from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return data


def size_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
