"""The journal of ``quark quantize``, with which the same command goes on after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING

from rich.markup import escape

from quark.cli import console
from quark.cli.quantize.request import Request

if TYPE_CHECKING:
    from quark.torch.pipeline.journal import Journal
    from quark.torch.quantization.config.config import Config


@contextmanager
def open_journal(request: Request, config: Config) -> Iterator[Journal | None]:
    """Open the journal beside the output, and remove it when all is written.

    There is none without algorithms, without an output and without room for it. The processes of
    torchrun share one, and the first one decides whether there is room.

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
    algorithms = len(config.algo_config or [])
    if not algorithms or not request.exports:
        yield None
        return
    with joined() as group:
        has_room = group.exchange(not group.is_first or _has_room(request, output, algorithms))[0]
    if not has_room:
        yield None
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with Journal(output.with_name(f"{output.name}.partial"), request.restart) as journal:
        place = escape(str(journal.directory))
        if journal.finished:
            console.out.print(f"  going on behind {journal.finished} finished blocks in {place}")
        try:
            yield journal
        except BaseException:
            if not journal.finished:
                journal.remove()
            elif journal.is_begun:
                console.err.print(
                    f"{journal.finished} finished blocks are in {place}: the same command goes on "
                    "behind them, with --restart it starts anew.",
                    soft_wrap=True,
                )
            raise
        journal.remove()


def _has_room(request: Request, output: Path, algorithms: int) -> bool:
    """Whether the disk has room for a journal, which has each block once for each algorithm."""
    source = request.model_dir
    files = [source] if source.is_file() else source.glob("*.safetensors")
    size = sum(path.stat().st_size for path in files)
    existing = next(path for path in (output, *output.parents) if path.exists())
    has_room = _free(existing) > size * (algorithms + 1)
    if not has_room:
        console.err.print(
            f"[yellow]warning:[/] {escape(str(existing))} has no room for finished blocks "
            f"({size * algorithms / 1e9:.1f} GB): a run that is killed will start anew.",
            soft_wrap=True,
        )
    return has_room


def _free(path: Path) -> int:
    return disk_usage(path).free
