"""``quark merge``: statistics of parts of the data, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli import console
from quark.cli.collect import read_statistics, write_statistics
from quark.cli.options import Json, add_verb, panel
from quark.cli.outputs import check_directory, check_room

HELP = """
Merge the statistics that [cyan]quark collect[/cyan] wrote for parts of the data.

Each part may come from another process or machine. The result is equivalent
to statistics of all data. Merging needs neither a model nor text.

[bold]Example[/bold]

    [cyan]quark merge statistics-0 statistics-1 --output_dir statistics[/cyan]
"""

_output = panel("Output")
Parts = Annotated[
    list[Path], typer.Argument(metavar="IN", help="Directories with statistics of one model.")
]
Target = Annotated[Path, _output("--output_dir", metavar="DIR", help="Directory to write.")]
Overwrite = Annotated[
    bool, _output("--overwrite", help="Replace an existing directory after success.")
]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "merge", merge, HELP)


def merge(
    parts: Parts, output_dir: Target, overwrite: Overwrite = False, as_json: Json = False
) -> None:
    """Merge statistics, write them and print their size."""
    from quark.torch.statistics.merging import merge_statistics

    check_directory("--output_dir", output_dir, overwrite)
    statistics = [read_statistics(directory, "IN") for directory in parts]
    sizes = [sum(file.stat().st_size for file in part.iterdir()) for part in parts]
    check_room("--output_dir", output_dir, max(sizes))
    with console.stage("merging statistics"):
        try:
            merged = merge_statistics(statistics)
        except ValueError as error:
            raise console.wrong("IN", str(error)) from None
    write_statistics(merged, output_dir, overwrite, as_json)
