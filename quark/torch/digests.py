"""Digests of files: written with every output, compared before it is read again.

They are in ``SHA256SUMS``, in the format of ``sha256sum``: a line "<digest>  <name>" for each file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from quark.torch.progress import bytes_progress

DIGESTS = "SHA256SUMS"
CHUNK = 1 << 22  # bytes that are read at once
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\x00-\x1f\\]+)")

Status = Literal["ok", "changed", "missing", "not listed"]


def write_digests(directory: Path) -> None:
    """Write the digest of each file of a directory, and of its subdirectories."""
    names = _names(directory)
    lines = (f"{digest}  {name}\n" for name, digest in _digests(directory, names))
    (directory / DIGESTS).write_text("".join(lines), encoding="utf-8", newline="\n")


def compare_digests(path: str | Path) -> dict[str, Status]:
    """Compare files with the digests that were written with them.

    Args:
        path: Directory of an output, or one file of it.

    Returns:
        Result for each file of the directory, or for the one file, in the order of names.

    Raises:
        FileNotFoundError: There are no digests.
        ValueError: The list of digests is damaged.
    """
    path = Path(path)
    directory = path if path.is_dir() else path.parent
    listed = _read(directory / DIGESTS)
    names = set(_names(directory)) if path.is_dir() else {path.name}
    names |= set(listed) if path.is_dir() else set()
    present = [name for name in listed if name in names and (directory / name).is_file()]
    actual = dict(_digests(directory, present))
    results: dict[str, Status] = {}
    for name in sorted(names):
        if name not in listed:
            results[name] = "not listed"
        elif name not in actual:
            results[name] = "missing"
        else:
            results[name] = "ok" if actual[name] == listed[name] else "changed"
    return results


def check_unchanged(path: str | Path) -> None:
    """Check that the files of an output are what was written.

    Files that were added to a directory since are ignored.

    Args:
        path: Directory of an output, or one file of it.

    Raises:
        FileNotFoundError: There are no digests.
        ValueError: A file is missing or has changed, or the list of digests is damaged.
    """
    path = Path(path)
    for name, status in compare_digests(path).items():
        if status in ("changed", "missing") or (status == "not listed" and path.is_file()):
            place = path / name if path.is_dir() else path
            what = {"changed": "has changed since it was written", "missing": "is missing"}
            raise ValueError(
                f"{place} {what.get(status, f'is not listed in {DIGESTS}')}: copy or export it "
                "again."
            )


def file_digest(path: Path, progress: Callable[[int], Any] = lambda size: None) -> str:
    """Return the digest of a file.

    Args:
        path: The file.
        progress: Takes the number of bytes after each part that was read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def _names(directory: Path) -> list[str]:
    """Return the names of files, relative and with slashes, without the list of digests."""
    names = (f.relative_to(directory).as_posix() for f in directory.rglob("*") if f.is_file())
    return sorted(name for name in names if name != DIGESTS)


def _digests(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Iterate over names with their digests; the progress of large files is shown."""
    sizes = {name: (directory / name).stat().st_size for name in names}
    with bytes_progress(sum(sizes.values()), "computing digests") as progress:
        for name in sizes:
            yield name, file_digest(directory / name, progress)


def _read(path: Path) -> dict[str, str]:
    """Return names -> digests.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a list of digests, or names files outside of its directory.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} has no {DIGESTS}: its files cannot be checked. Outputs of this "
            "version have one; export it again, or write one with sha256sum."
        )
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): copy or export it again.") from None
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        name = match[2] if match else ""
        if match is None or name in listed or Path(name).is_absolute() or ".." in name.split("/"):
            raise ValueError(f"{path}, line {number} is damaged: copy or export it again.")
        listed[name] = match[1]
    if not listed:
        raise ValueError(f"{path} is empty: copy or export it again.")
    return listed
