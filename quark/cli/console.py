"""What all verbs share on the terminal: output, stages of work, errors, and quiet libraries."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

WIDTH = 120  # of what is not a terminal, unless COLUMNS says otherwise


def _width() -> int | None:
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH


out = Console(highlight=False, width=_width())
err = Console(stderr=True, highlight=False)

_is_verbose = False


def set_verbose(wanted: bool) -> bool:
    """Switch to showing everything, for the rest of the session; what ``--verbose`` calls."""
    global _is_verbose
    if wanted:
        _is_verbose = True
        logging.getLogger("quark").setLevel(logging.INFO)
        warnings.simplefilter("default")
    return wanted


class _Handler(logging.Handler):
    """Shows the log of this package in one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        label = record.levelname.lower()
        colour = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = escape(record.getMessage())
        err.print(f"[{colour}]{label}:[/] {text}", soft_wrap=True)


@contextmanager
def session() -> Iterator[None]:
    """Show our own warnings, keep other libraries quiet, and put all back afterwards."""
    global _is_verbose
    _is_verbose = False
    for name in ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    logger = logging.getLogger("quark")
    before = logger.handlers, logger.level
    logger.handlers = [_Handler()]
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"quark\.")
        try:
            yield
        finally:
            logger.handlers, level = before
            logger.setLevel(level)


def report(error: Exception) -> int:
    """Say in one line what went wrong and return the exit code: 2 for a wrong call, else 1."""
    is_usage = hasattr(error, "format_message")  # what typer raises about arguments
    if _is_verbose and not is_usage:
        err.print(escape("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)
    text = error.format_message() if is_usage else str(error)  # type: ignore[attr-defined]
    text = " ".join(text.split()) or type(error).__name__
    if not isinstance(error, (ValueError, OSError)) and not is_usage:
        text = f"{type(error).__name__}: {text}"
    context = getattr(error, "ctx", None)
    hint = f" [dim]({context.command_path} --help)[/]" if context is not None else ""
    err.print(f"[bold red]error:[/] {escape(text)}{hint}", soft_wrap=True)
    return int(getattr(error, "exit_code", 1)) if is_usage else 1


def wrong(flag: str, message: str) -> typer.BadParameter:
    """Return the error of a flag with a value that cannot be used."""
    return typer.BadParameter(message, param_hint=flag)


@contextmanager
def stage(text: str, spinner: bool = False) -> Iterator[None]:
    """Show what is being done and, once it is, how long it took.

    Args:
        text: What is being done.
        spinner: Whether to show a spinner, for work that shows no progress itself.
    """
    start = time.monotonic()
    if err.is_terminal and not spinner:
        err.print(f"  [dim]{text} …[/]", end="\r")  # a progress bar takes the same line
    with err.status(text) if spinner and err.is_terminal else nullcontext():
        yield
    err.print(f"  [dim]{text:<40} {time.monotonic() - start:6.1f} s[/]")


def table(title: str | None = None) -> Table:
    """Return an empty table in the look of all tables."""
    return Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")


def facts(rows: dict[str, str]) -> Table:
    """Return a table of two columns without head: what, and its value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(f"  {name}", value)
    return grid


def say(text: str) -> None:
    """Print a paragraph between margins."""
    out.print(Padding(text, (0, 2), expand=False))


def show_code(*lines: str) -> None:
    """Show lines to copy, never broken."""
    for line in lines:
        out.print(f"    [cyan]{escape(line)}[/]", soft_wrap=True)


def in_bytes(count: int) -> str:
    """Say a number of bytes: ``8.2 MB``."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def in_count(count: int) -> str:
    """Say a large number: ``3.4 M``."""
    return _scaled(count, ("", "k", "M", "G", "T")).rstrip()


def in_bits(bits: float | None) -> str:
    """Say bits per weight; a dash where there is no weight."""
    return "–" if bits is None else f"{bits:.2f}"


def in_percent(value: float, reference: float) -> str:
    """Say the change from a reference: ``+3.1 %``."""
    return f"{100 * (value / reference - 1):+.1f} %"


def _scaled(count: int, units: tuple[str, ...]) -> str:
    value, unit = float(count), units[0]
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = 0 if unit == units[0] or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def as_json(data: Any) -> None:
    """Print data as JSON and nothing else."""
    import json

    typer.echo(json.dumps(data, indent=2))
