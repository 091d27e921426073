"""The journal of ``quark quantize``, with which the same command goes on after a kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from quark.cli import console
from quark.cli.quantize.flags import EvaluationFlags
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from quark.torch.pipeline.journal import Journal
    from quark.torch.quantization.config.config import Config


# Flags that change nothing of an output, besides those of the evaluation.
_WITHOUT_EFFECT = {"overwrite", "restart", "verbose", "given", "offload_dir"}
_WRITTEN = {"output_dir", "save_dir"}  # flags of directories that are written


def is_finished(request: Request) -> bool:
    """Whether an earlier run of the same request was killed after its last step.

    Then its output is complete, which is said, and what is left of the run is removed. The
    processes of torchrun call this together.

    Args:
        request: The flags.

    Raises:
        FileExistsError: Another run writes this output.
    """
    from quark.torch.pipeline.journal import Journal
    from quark.torch.pipeline.processes import joined

    output = request.output_dir.resolve()
    place = _place(output)
    if request.restart or request.plan or not _has_note(request):
        return False
    with joined() as group:
        is_there = group.exchange(output.is_dir() and Journal.has_note(place))[0]
    if not is_there:
        return False
    with Journal(place) as journal:
        with joined() as group:
            own = not group.is_first or journal.is_of_output(_describe(request), output)
            is_complete: bool = group.exchange(own)[0]
        if is_complete:
            journal.remove()
    if is_complete:
        measured = "" if request.skip_evaluation else " 'quark evaluate' measures it."
        console.out.print(
            f"  {escape(str(output))} is complete: the run that wrote it was stopped after its "
            f"last step.{measured}",
            soft_wrap=True,
        )
    return is_complete


def note_output(request: Request, journal: Journal | None) -> Callable[[Path], None] | None:
    """Return a function that notes in a journal which output belongs to it; None without."""
    if journal is None or not _has_note(request):
        return None
    return partial(journal.note_output, _describe(request))


def _has_note(request: Request) -> bool:
    """Whether a run ends with its checkpoint; else a complete checkpoint is not all of it."""
    ends = request.params_save or request.save_metrics_to_csv
    return bool(request.exports) and not ends


def _describe(request: Request) -> dict[str, Any]:
    """Return what an output is asked for, with sizes and times of the files that are read."""
    import torch

    from quark import __version__

    left_out = _WITHOUT_EFFECT | {field.name for field in fields(EvaluationFlags)}
    flags: dict[str, list[str]] = {}
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in left_out and value is not None:
            flags[field.name] = list(map(str, value if isinstance(value, list) else [value]))
    given = [value for name in flags for value in flags[name] if name not in _WRITTEN]
    return {
        "versions": [__version__, torch.__version__],
        "flags": flags,
        "files": [_identify(file) for value in given for file in _files_at(value)],
    }


def _files_at(value: str) -> list[Path]:
    """Return the files of a directory, or one file; none if no path has that name."""
    path = Path(value)
    try:
        if value and path.is_dir():
            return sorted(file for file in path.iterdir() if file.is_file())
        return [path] if path.is_file() else []
    except (OSError, ValueError):  # a value that cannot be a path
        return []


def _identify(file: Path) -> list[str | int]:
    status = file.stat()
    return [str(file.resolve()), status.st_size, status.st_mtime_ns]


def _place(output: Path) -> Path:
    """Return the directory of the journal of an output."""
    return output.with_name(f"{output.name}.partial")


@contextmanager
def open_journal(request: Request, config: Config) -> Iterator[Journal | None]:
    """Open the journal beside the output, and remove it when all is written.

    There is none without an output. Without room for it, and for a run without algorithms and
    finish where a run with them left its blocks, it only keeps other runs away from the output. The
    processes of torchrun share one, and the first one decides whether there is room. Without such
    work it holds no blocks, but knows its output.

    Args:
        request: The flags.
        config: How the model will be quantized.

    Raises:
        FileExistsError: Another run writes this output.
        FileNotFoundError: Another machine does not see the directory of the output.
    """
    from quark.torch.pipeline.journal import Journal
    from quark.torch.pipeline.processes import joined

    output = request.output_dir.resolve()
    works = len(config.algo_config or []) + (request.finish is not None)
    if not request.exports:
        yield None
        return
    with joined() as group:
        is_kept = Journal.has_blocks(_place(output)) and not works and not request.restart
        has_room = not works or not group.is_first or _has_room(request, output, works)
        is_opened = group.exchange(has_room and not is_kept)[0]
    made = [path for path in output.parents if not path.exists()]  # the innermost first
    output.parent.mkdir(parents=True, exist_ok=True)
    with Journal(_place(output), request.restart) as journal:
        if not is_opened:
            try:
                yield None
            finally:
                if not journal.describe():
                    journal.remove()
                    _remove_empty(made)
            return
        place = escape(str(journal.directory))
        if found := journal.describe():
            console.out.print(f"  going on after {found} in {place}")
        try:
            yield journal
        except BaseException:
            found = journal.describe()
            if not found:
                journal.remove()
                _remove_empty(made)
            elif journal.is_begun:
                console.err.print(
                    f"{place} holds {found}: the same command goes on after that, with --restart "
                    "it starts anew.",
                    soft_wrap=True,
                )
            raise
        journal.remove()


def _remove_empty(directories: list[Path]) -> None:
    """Remove those of some directories that are empty; the innermost come first."""
    for path in directories:
        with suppress(OSError):
            path.rmdir()


def _has_room(request: Request, output: Path, works: int) -> bool:
    """Whether the disk has room for a journal, which has each block once for each algorithm.

    The finish is one more: its scales and moments take less than the model.
    """
    source = request.model_dir
    files = [source] if source.is_file() else source.glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    existing = next(path for path in (output, *output.parents) if path.exists())
    has_room = _free(existing) > size * (works + 1)
    if not has_room:
        console.err.print(
            f"[yellow]warning:[/] {escape(str(existing))} has no room for finished blocks "
            f"({size * works / 1e9:.1f} GB): a run that is killed will start anew.",
            soft_wrap=True,
        )
    return has_room


def _free(path: Path) -> int:
    return disk_usage(path).free
