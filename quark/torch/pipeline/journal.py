"""The journal of a run: the blocks that are finished, on the disk, so that a killed run can go on.

A journal is a directory::

    run.json                                 what the run was asked for
    output.json                              which output belongs to it, before that is in place
    lock                                     held by the process that runs
    blocks/1-0003-<digest>.safetensors       what pass 1 made of the fourth block of its list
    steps/2-0003-<digest>.safetensors        the finish after its fourth measured step

A file of a block or step is written under another name, synced, and renamed to its name, which has
the digest of its bytes. So a file of such a name is complete, or the disk is damaged. Steps replace
each other: the last one is kept.

Of several processes the first one holds the lock, writes the files and says which there are. The
others read them, so all see one file system.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout

from quark.torch.digests import DIGESTS, check_unchanged, file_digest
from quark.torch.files import check_space, read_json, size_of, write_json
from quark.torch.pipeline.processes import joined, processes
from quark.torch.pipeline.scratch import with_strides
from quark.torch.replacement import sync_directory, sync_file

logger = logging.getLogger("quark")

_NAME = re.compile(r"(\d+)-(\d+)-([0-9a-f]{64})\.safetensors")
_NOTES = "notes"  # key of the metadata of a file
_PARTIAL = "partial"
_RUN, _OUTPUT = "run.json", "output.json"
_BLOCKS, _STEPS = "blocks", "steps"
_PARTS = (_RUN, _OUTPUT, ".*.json.partial-*", "lock", _BLOCKS, _STEPS)


class Journal:
    """The finished blocks of a run. The same run goes on after them, with the same bits.

    It is a context manager: the directory is locked until the context is left. It stays, until
    ``remove`` is called. In an initialized process group of ``torch.distributed``, all processes
    make one of the same directory; the run may go on with another number of processes.

    Args:
        directory: The directory; it is made if it does not exist.
        restart: Whether to throw away what is there.

    Attributes:
        is_begun: Whether ``begin`` has accepted a request.

    Raises:
        FileExistsError: Another run uses it, or the directory holds something else.
        FileNotFoundError: A process does not see the directory that the first one made.
    """

    def __init__(self, directory: str | Path, restart: bool = False) -> None:
        self.directory = Path(directory).resolve()
        self._blocks, self._steps = self.directory / _BLOCKS, self.directory / _STEPS
        self._passes, self.is_begun = 0, False
        self._lock: FileLock | None = None  # of the first process
        with joined() as group:
            if group.is_first:
                self._open(restart)
            group.exchange(None)  # the others look for the directory when it is there
            if not self._steps.is_dir():
                raise FileNotFoundError(
                    f"Process {group.rank} of {group.count} does not see {self.directory}, which "
                    "process 0 has made: choose an output on a disk that all machines share."
                )

    def _open(self, restart: bool) -> None:
        """Lock the directory, and remove what a killed process left incomplete."""
        _check_own(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise FileExistsError(
                f"Another process works in {self.directory}: wait for it, or choose another output."
            ) from None
        self._lock = lock
        if restart:
            self._clear()
        for place in (self._blocks, self._steps):
            place.mkdir(exist_ok=True)
            for path in place.iterdir():
                if not _NAME.fullmatch(path.name):  # a process was killed while it wrote the file
                    path.unlink()

    def for_this_thread(self) -> Journal:
        """Return the journal of this thread: each counts its passes, the first one has the lock."""
        if processes().is_first:
            return self
        own = copy.copy(self)
        own._lock = None
        return own

    @property
    def finished(self) -> int:
        """Number of finished blocks, of all passes together."""
        return _count(self._blocks)

    @property
    def has_steps(self) -> bool:
        """Whether a finish has measured a step."""
        return _count(self._steps) > 0

    def describe(self) -> str:
        """Return the finished work as text, such as ``12 finished blocks``; empty without any."""
        count = self.finished
        blocks = [f"{count} finished block{'s' if count > 1 else ''}"] if count else []
        return " and ".join([*blocks, *(["the last measured step"] if self.has_steps else [])])

    def begin(self, request: Mapping[str, Any]) -> None:
        """Begin a run, or go on with it. Of several processes, the request of the first one counts.

        Args:
            request: What the run is asked for, in types of JSON.

        Raises:
            ValueError: The journal is that of another run; the message says what differs.
        """
        self._passes, self.is_begun = 0, False
        group = processes()
        if group.is_first:
            self._check_request(request)
        group.exchange(None)  # an error of the first process ends all of them here
        self.is_begun = True

    def _check_request(self, request: Mapping[str, Any]) -> None:
        path, given = self.directory / _RUN, json.loads(json.dumps(request))
        if not self.describe():
            write_json(path, given)
            sync_directory(self.directory)
        try:
            difference = _first_difference(read_json(path), given)
        except ValueError as error:
            difference = str(error)
        if difference is not None:
            raise ValueError(
                f"{self.directory} holds the blocks of another run: {difference}. Ask for the same "
                "to go on, or throw them away: --restart, or Journal(directory, restart=True)."
            )

    def begin_pass(self, blocks: list[str]) -> PassFiles:
        """Return the files of the next pass over blocks. All processes call this together.

        Args:
            blocks: Names of the blocks.
        """
        return self._begin(self._blocks, blocks)

    def begin_steps(self, steps: list[str]) -> PassFiles:
        """Return the files of a finish, which writes and removes steps as a pass does blocks.

        Args:
            steps: Names of the steps that are measured.
        """
        return self._begin(self._steps, steps)

    def _begin(self, place: Path, names: list[str]) -> PassFiles:
        self._passes += 1
        return PassFiles(place, self._passes - 1, names)

    @staticmethod
    def has_note(directory: Path) -> bool:
        """Whether a directory is a journal that knows its output; see ``note_output``."""
        return (directory / _OUTPUT).is_file()

    @staticmethod
    def has_blocks(directory: Path) -> bool:
        """Whether a directory is a journal with finished blocks or a measured step."""
        return any(_count(directory / part) for part in (_BLOCKS, _STEPS))

    def note_output(self, request: Mapping[str, Any], output: Path) -> None:
        """Note which output belongs to the journal, before it takes its place.

        A process that is killed after that leaves a complete output and a journal, which
        ``is_of_output`` recognizes.

        Args:
            request: What the output was asked for, in types of JSON.
            output: The complete directory, with the digests of its files.
        """
        note = {"request": request, "digest": file_digest(output / DIGESTS)}
        write_json(self.directory / _OUTPUT, note)
        sync_directory(self.directory)

    def is_of_output(self, request: Mapping[str, Any], output: Path) -> bool:
        """Whether a directory is the complete output of this request, with unchanged files."""
        given = json.loads(json.dumps(request))
        try:
            note = {"request": given, "digest": file_digest(output / DIGESTS)}
            if read_json(self.directory / _OUTPUT) != note:
                return False
            check_unchanged(output)
        except (OSError, ValueError):
            return False
        return True

    def remove(self) -> None:
        """Remove the journal: the run is over. Processes other than the first one do nothing."""
        if self._lock is None:
            return
        self._clear()
        self.close()
        with suppress(OSError):
            (self.directory / "lock").unlink(missing_ok=True)
            self.directory.rmdir()

    def close(self) -> None:
        """Give the directory free for other runs."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Journal:
        """Return the journal."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the journal."""
        self.close()

    def _clear(self) -> None:
        # Blocks first: a process that is killed here leaves none under another request. The note of
        # the output goes last: until then, the output is known to belong to the journal.
        for place in (self._blocks, self._steps):
            shutil.rmtree(place, ignore_errors=True)
        partial = self.directory.glob(".*.json.partial-*")
        for path in [self.directory / _RUN, *partial, self.directory / _OUTPUT]:
            path.unlink(missing_ok=True)


class Entry(NamedTuple):
    """What a pass made of a block.

    Attributes:
        path: File of the tensors.
        notes: All else, in types of JSON.
    """

    path: Path
    notes: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, on the CPU, in the order in memory that they had."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as opened:
            return {
                name: with_strides(opened.get_tensor(name), tuple(strides))
                for name, strides in self.notes["strides"].items()
            }


class PassFiles:
    """The finished blocks of a pass, the same in all processes.

    Files whose digest differs are dropped with a warning: these blocks are computed again.

    Args:
        directory: Directory of the files.
        number: Number of the pass.
        blocks: Names of its blocks.
    """

    def __init__(self, directory: Path, number: int, blocks: list[str]) -> None:
        self._directory, self._number, self._blocks = directory, number, blocks
        group = processes()
        names = group.exchange(self._find() if group.is_first else {})[0]
        self.entries = {block: self._read(name) for block, name in names.items()}

    def _find(self) -> dict[str, str]:
        """Return the name of the file of each finished block."""
        names: dict[str, str] = {}
        for path in sorted(self._directory.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or int(match[1]) != self._number or int(match[2]) >= len(self._blocks):
                continue
            block = self._blocks[int(match[2])]
            if file_digest(path) == match[3]:
                names[block] = path.name
            else:
                logger.warning("%s is damaged: %s is computed again.", path, block)
                path.unlink()
        return names

    def _read(self, name: str) -> Entry:
        from safetensors import safe_open

        path = self._directory / name
        with safe_open(path, framework="pt") as opened:
            return Entry(path, json.loads(opened.metadata()[_NOTES]))

    def write(
        self, block: str, tensors: Mapping[str, torch.Tensor], notes: dict[str, Any]
    ) -> Entry:
        """Write what the pass made of a block. When this returns, it is on the disk.

        All processes call this together, with the same block. The first one writes.

        Raises:
            OSError: The disk is full.
        """
        group = processes()
        name = self._save(block, tensors, notes) if group.is_first else None
        self.entries[block] = self._read(group.exchange(name)[0])
        return self.entries[block]

    def remove(self, block: str) -> None:
        """Remove the file of a block that a later one replaces. The first process removes it."""
        entry = self.entries.pop(block)
        if processes().is_first:
            entry.path.unlink()

    def _save(self, block: str, tensors: Mapping[str, torch.Tensor], notes: dict[str, Any]) -> str:
        """Write a file and return its name."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        check_space(self._directory, size_of(dict(tensors)))
        notes = notes | {"strides": {name: list(x.stride()) for name, x in tensors.items()}}
        stored = {n: x.detach().cpu().contiguous().clone() for n, x in tensors.items()}
        partial = self._directory / _PARTIAL
        try:
            save_file(stored, partial, metadata={_NOTES: json.dumps(notes)})
        except SafetensorError as error:
            raise OSError(f"{block} could not be written to {self._directory}: {error}") from None
        sync_file(partial)
        name = f"{self._number}-{self._blocks.index(block):04d}-{file_digest(partial)}.safetensors"
        partial.replace(self._directory / name)
        sync_directory(self._directory)
        return name


def _count(blocks: Path) -> int:
    """Return the number of files in a directory; 0 if it does not exist."""
    return sum(1 for _ in blocks.iterdir()) if blocks.is_dir() else 0


def _check_own(directory: Path) -> None:
    """Raise unless a directory is a journal, or empty, or missing."""
    if not directory.exists():
        return
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else {""}
    if not all(any(fnmatch(name, part) for part in _PARTS) for name in names):
        raise FileExistsError(
            f"{directory} is not a journal, but it is needed for one: move it away, or choose "
            "another output."
        )


def _first_difference(old: Any, new: Any, place: str = "") -> str | None:
    """Return the first place where two values of JSON differ, with both values, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            inside = _first_difference(old.get(key), new.get(key), f"{place}.{key}".lstrip("."))
            if inside is not None:
                return inside
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        differences = (_first_difference(*pair, f"{place}[{i}]") for i, pair in pairs)
        return next((d for d in differences if d is not None), None)
    return None if old == new else f"{place} was {_short(old)} and is {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
