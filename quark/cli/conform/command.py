"""``quark conform``: numbers of this package compared with definitions and other software."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from quark import __version__
from quark.cli import console
from quark.cli.options import Json, add_verb, in_words, one_of, panel
from quark.cli.outputs import check_file
from quark.conformance.registry import DEFINITIONS, ORACLES, is_installed, run, version

if TYPE_CHECKING:
    from quark.conformance.page import Run

_OTHERS = [name for name in ORACLES if name != DEFINITIONS]

HELP = f"""
Compare rounding, codes, blocks and packed words with their definitions and with other software.

The definitions need nothing installed: each value is searched among all values of a format. Other
software is used if it is installed: {in_words(_OTHERS)}.

[bold]differences[/bold] are values for which this package departs from the definition; the exit
status is 1 if there are any. [bold]deviations[/bold] are values for which the other software does.

[bold]Examples[/bold]

    [cyan]quark conform[/cyan]

    [cyan]quark conform --quick[/cyan]

    [cyan]quark conform --oracle definitions --oracle ml_dtypes --json[/cyan]

    [cyan]quark conform --page conformance.md[/cyan]
"""

QUICK = 61  # one value of so many; with no factor in common with the spacing of any format

_what, _output = panel("Comparisons"), panel("Output")
Oracles = Annotated[
    list[str] | None,
    _what(
        "--oracle",
        metavar="NAME",
        **one_of("--oracle", lambda: ORACLES),
        help=f"Software to compare with: {in_words(ORACLES)}; repeatable (default: all installed).",
    ),
]
Quick = Annotated[
    bool, _what("--quick", help=f"Take one 16-bit value of {QUICK}. The extremes are all taken.")
]
Page = Annotated[Path | None, _output("--page", metavar="FILE", help="Page to write, in Markdown.")]
Checkpoints = Annotated[
    Path | None,
    _output(
        "--checkpoints",
        metavar="FILE",
        help="Results of scripts/interop.py --json, for a table of the page.",
    ),
]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace an existing page.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    add_verb(app, "conform", conform, HELP)


def conform(
    oracle: Oracles = None,
    quick: Quick = False,
    page: Page = None,
    checkpoints: Checkpoints = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Print a table of comparisons; exit with 1 if this package departs from a definition."""
    from quark.conformance import page as pages

    console.show_json_only(as_json)
    if checkpoints is not None and page is None:
        raise console.wrong("--checkpoints", "the results are for a page: give --page too.")
    if page is not None:
        check_file("--page", page, overwrite)
    stored = None
    if checkpoints is not None:
        try:
            stored = pages.read_checkpoints(checkpoints)
        except (OSError, ValueError) as error:
            raise console.wrong("--checkpoints", str(error)) from None
    missing = [name for name in oracle or [] if not is_installed(name)]
    if missing:
        text = f"{', '.join(missing)} cannot be imported. Install it, or leave it out."
        raise console.wrong("--oracle", text)
    runs = [_run(name, QUICK if quick else 1) for name in oracle or ORACLES]
    _print(runs)
    if page is not None:
        from quark.torch.files import write_text

        write_text(page, pages.render(runs, __version__, stored))
        console.say(f"page: {escape(str(page))}")
    if as_json:
        console.as_json({"version": __version__, "oracles": [_as_dict(run) for run in runs]})
    if any(c.differences for run in runs for c in run.comparisons or []):
        raise typer.Exit(1)


def _run(name: str, every: int) -> Run:
    """Return the comparisons with an oracle, none if its software is not installed."""
    from quark.conformance.page import Run

    if not is_installed(name):
        return Run(name, "", None)
    with console.stage(f"comparing with {name}", spinner=True):
        return Run(name, version(name), list(run(name, every)))


def _print(runs: list[Run]) -> None:
    """Print the sums of each format, and the deviations of other software."""
    from quark.conformance.page import by_format

    table = console.table()
    for column in ("compared with", "format"):
        table.add_column(column, no_wrap=True)
    for column in ("values", "differences", "deviations"):
        table.add_column(column, justify="right")
    for item in runs:
        software = escape(f"{item.oracle} {item.version}".strip())
        for name, total in by_format(item.comparisons or []).items():
            colour = "bold red" if total.differences else "green"
            differences = f"[{colour}]{total.differences}[/]"
            table.add_row(software, name, f"{total.values:,}", differences, f"{total.deviations:,}")
            software = ""
        table.add_section()
    console.out.print("", table)
    for item in runs:
        for c in item.comparisons or []:
            if c.differences or c.deviations:
                console.say(f"{escape(f'{item.oracle}, {c.format}, {c.operation}: {c.example}')}")
    missing = [item.oracle for item in runs if item.comparisons is None]
    if missing:
        console.say(f"\nNot installed: {escape(', '.join(missing))}")


def _as_dict(item: Run) -> dict[str, object]:
    comparisons = item.comparisons
    return {
        "oracle": item.oracle,
        "version": item.version,
        "is_installed": comparisons is not None,
        "comparisons": [c._asdict() for c in comparisons or []],
    }
