"""``quark merge``: statistics of parts of the data, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli import console
from quark.cli.collect import check_target, read_kept, write
from quark.cli.options import Verbose, panel

HELP = """
Put together what [cyan]quark collect[/cyan] wrote for parts of the data.

Each part may come from a process or a machine of its own. The result serves as if it had been
collected with all of the data. No model is needed, and no text.

[bold]Example[/bold]

    [cyan]quark merge statistics-0 statistics-1 --output_dir statistics[/cyan]
"""

_output = panel("Output")
Parts = Annotated[
    list[Path], typer.Argument(metavar="IN", help="Directories of statistics of one model.")
]
Target = Annotated[Path, _output("--output_dir", metavar="DIR", help="Directory to write.")]
Overwrite = Annotated[
    bool, _output("--overwrite", help="Replace the directory, once all went well.")
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("merge", help=HELP)(merge)


def merge(
    parts: Parts, output_dir: Target, overwrite: Overwrite = False, verbose: Verbose = False
) -> None:
    """Merge statistics and say what came of it."""
    from quark.torch.statistics.merging import merge_statistics

    check_target(output_dir, overwrite)
    found = [read_kept(directory, "IN") for directory in parts]
    with console.stage("merging statistics"):
        try:
            statistics = merge_statistics(found)
        except ValueError as error:
            raise console.wrong("IN", str(error)) from None
    write(statistics, output_dir, overwrite)
