"""The terminal: tables, progress, errors, and logging of this package and of libraries."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from quark.cli.fitting_table import FittingTable
from quark.cli.option_words import in_json
from quark.cli.other_names import advice
from quark.torch import progress
from quark.torch.quantization.config.name_lookup import printable

if TYPE_CHECKING:
    from quark.torch.evaluation.predictions import Predictions

WIDTH = 120  # columns of an output that is not a terminal, unless COLUMNS is set


def _width() -> int | None:
    return None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH


class _Console(Console):
    """A console on which names from files cannot control the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string with markup, of the width that it is shown in."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of an output, with escapes for control characters of its texts."""
        for segment in super().render(renderable, options):
            is_text = not segment.control and segment.text.strip("\r\n")
            yield segment._replace(text=printable(segment.text)) if is_text else segment


out = _Console(highlight=False, width=_width())
err = _Console(stderr=True, highlight=False)

_steps = logging.getLogger("quark.cli.steps")  # for the log file; the terminal shows steps anyway


class _Shown:
    """What is shown on the terminal."""

    is_verbose = False
    is_quiet = False


def set_verbose(wanted: bool) -> None:
    """Show the log of level info and tracebacks for the rest of the session (``--verbose``)."""
    if wanted:
        _Shown.is_verbose = True
        warnings.simplefilter("default")


def set_quiet(wanted: bool) -> None:
    """Show warnings and errors only for the rest of the session (``--quiet``)."""
    if wanted:
        _Shown.is_quiet = out.quiet = True


def show_json_only(wanted: bool) -> None:
    """Print nothing but the JSON of ``as_json`` to the standard output."""
    out.quiet = out.quiet or wanted


def open_log_file(path: Path | None) -> None:
    """Write the log to a file too for the rest of the session, after what it holds.

    Raises:
        typer.BadParameter: It cannot be written.
    """
    if path is None:
        return
    try:
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise wrong("--log_file", f"{path} cannot be written: {error.strerror}.") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.getLogger("quark").addHandler(handler)
    _steps.info("quark %s", " ".join(sys.argv[1:]))


class _LogFile(logging.FileHandler):
    """The file of the log. A disk that is full ends the log, with a warning, and not the work."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once of a record that cannot be written, and write no others."""
        self._end(sys.exc_info()[1])

    def close(self) -> None:
        """Close the file, which writes what is left."""
        try:
            super().close()
        except OSError as error:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.level < _NEVER:
            self.setLevel(_NEVER)
            reason = getattr(error, "strerror", None) or error
            path = escape(self.baseFilename)
            text = f"--log_file: {path} ends here, since it cannot be written: {reason}."
            err.print(f"[yellow]warning:[/] {text}", soft_wrap=True)


_NEVER = logging.CRITICAL + 1  # level of no record


class _Handler(logging.Handler):
    """Prints each record of the log of this package in one line, and a warning once."""

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        if record.name == _steps.name or self._is_known(record):
            return False
        is_progress = record.name == progress.logger.name and not _Shown.is_quiet
        return record.levelno >= logging.WARNING or _Shown.is_verbose or is_progress

    def _is_known(self, record: logging.LogRecord) -> bool:
        """Whether a record is a warning that was shown before."""
        if record.levelno != logging.WARNING:
            return False
        text = record.getMessage()
        is_known = text in self._warned
        self._warned.add(text)
        return is_known

    def emit(self, record: logging.LogRecord) -> None:
        label = record.levelname.lower()
        colour = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = escape(record.getMessage())
        err.print(f"[{colour}]{label}:[/] {text}", soft_wrap=True)


@contextmanager
def session() -> Iterator[None]:
    """Show warnings of this package, silence other libraries, and restore both afterwards."""
    _Shown.is_verbose = _Shown.is_quiet = out.quiet = False
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # its errors are raised as well
    logger = logging.getLogger("quark")
    before = logger.handlers, logger.level
    logger.handlers = [_Handler()]
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"quark\.")
        try:
            yield
        finally:
            for handler in logger.handlers:
                handler.close()
            logger.handlers, level = before
            logger.setLevel(level)


def report(error: Exception) -> int:
    """Print an error in one line and return the exit code: 2 for a wrong call, else 1."""
    is_usage = hasattr(error, "format_message")  # errors of typer about arguments
    if _Shown.is_verbose and not is_usage:
        err.print(escape("".join(traceback.format_exception(error)).rstrip()), soft_wrap=True)
    text = error.format_message() if is_usage else str(error)  # type: ignore[attr-defined]
    context, option = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is not None and hasattr(error, "param_type"):  # a parameter is missing
        text += first_example(context.command.help or "")
    elif context is not None and hasattr(error, "possibilities"):
        text = _unknown_flag(error, text, context.command)
    elif option is not None and ("valid integer" in text or "valid number" in text):  # says typer
        text = _no_number(option, "valid integer" in text)
    elif option is not None:
        text = text.replace("Input should be greater than or equal to", "expected at least")
    text = " ".join(text.split()) or type(error).__name__
    if "No space left on device" in text:
        text = _full_disk(error, text)
    elif "File too large" in text:
        text = _limited_file(error, text)
    elif not isinstance(error, (ValueError, OSError, FloatingPointError)) and not is_usage:
        text = f"{type(error).__name__}: {text}"
    elif isinstance(error, ValueError):
        text = in_json(text)
    _steps.error(text, exc_info=None if is_usage else error)
    hint = f" [dim]({context.command_path} --help)[/]" if context is not None else ""
    err.print(f"[bold red]error:[/] {escape(text)}{hint}", soft_wrap=True)
    return int(getattr(error, "exit_code", 1)) if is_usage or isinstance(error, ValueError) else 1


def _limited_file(error: Exception, text: str) -> str:
    """Return the message for a file that is larger than allowed, with what to do."""
    named = getattr(error, "filename", None)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        text = f"{error.strerror} for {named}" if named else str(error.strerror)
    return (
        f"{text.rstrip('.')}: a limit of this process or of the file system forbids it. Raise the "
        "limit ('ulimit -f unlimited'), or write to another file system: the output directory, or "
        "TMPDIR for temporary files. Then run the same command again."
    )


def _full_disk(error: Exception, text: str) -> str:
    """Return the message for a disk that is full, with what to do."""
    if "make room" in text.lower():
        return text
    named = getattr(error, "filename", None)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        text = f"{error.strerror} for {named}" if named else str(error.strerror)
    return (
        f"{text.rstrip('.')}. Make room on the disk, or write to another one: the output "
        "directory, or TMPDIR for temporary files. Then run the same command again."
    )


def _unknown_flag(error: Any, text: str, command: Any) -> str:
    """Return the message for an unknown flag; that of typer where no other tool has the flag."""
    kinds: dict[str, list[str]] = {"option": [], "argument": []}
    for parameter in command.params:
        kinds[parameter.param_type_name].append(parameter.name)
    said = advice(getattr(error, "option_name", ""), kinds["option"], kinds["argument"])
    if said is None:
        return text
    example = "" if "--" in said else first_example(command.help or "")
    return f"{error.message}. {said}{example}"


def _no_number(option: Any, is_whole: bool) -> str:
    """Return the message for a value of a flag that is no number, or no whole one."""
    flag, default = option.opts[0], option.default
    example = f", such as {flag} {default}" if isinstance(default, int) else ""
    kind = "whole number" if is_whole else "number"
    return f"Invalid value for {flag}: expected a {kind}{example}. {flag}: {option.help}"


def first_example(text: str) -> str:
    """Return the first command of the help of a verb, as a sentence; "" without one."""
    found = re.search(r"^ +\[cyan\](quark .*?)\[/cyan\]", text, re.MULTILINE | re.DOTALL)
    command = "" if found is None else found[1].replace("\\\n", "")
    return command and f" For example: {command}"


def wrong(flag: str, message: str) -> typer.BadParameter:
    """Return the error for a flag with a wrong value."""
    return typer.BadParameter(message, param_hint=flag)


@contextmanager
def blaming(flag: str) -> Iterator[None]:
    """Turn an error of a value inside of the context into the error of a flag.

    Args:
        flag: The flag that has the value.

    Raises:
        typer.BadParameter: A ``ValueError`` was raised.
    """
    try:
        yield
    except ValueError as error:
        raise wrong(flag, str(error)) from None


@contextmanager
def stage(text: str, spinner: bool = False) -> Iterator[None]:
    """Show a step of the work and, after it, the time it took.

    Args:
        text: Description of the step.
        spinner: Whether to show a spinner, for steps without a progress bar.
    """
    start = time.monotonic()
    is_live = err.is_terminal and not _Shown.is_quiet
    if is_live and not spinner:
        err.print(f"  [dim]{text} …[/]", end="\r")  # a progress bar overwrites this line
    with err.status(text) if spinner and is_live else nullcontext():
        yield
    seconds = time.monotonic() - start
    _steps.info("%s: %.1f s", text, seconds)
    if not _Shown.is_quiet:
        err.print(f"  [dim]{text:<40} {seconds:6.1f} s[/]")


def table(title: str | None = None) -> FittingTable:
    """Return an empty table in the common style."""
    return FittingTable(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")


def fits(table: FittingTable) -> bool:
    """Return whether the terminal shows a table without breaking a word."""
    return table.fits(out, out.options)


def facts(rows: dict[str, str]) -> Table:
    """Return a table with two columns, name and value, and no header."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(f"  {name}", value)
    return grid


def say(text: str) -> None:
    """Print a paragraph with margins."""
    out.print(Padding(text, (0, 2), expand=False))


def show_code(*lines: str) -> None:
    """Print lines of code without line breaks."""
    for line in "\n".join(lines).splitlines():
        out.print(f"    [cyan]{escape(line)}[/]", soft_wrap=True)


def format_bytes(count: int) -> str:
    """Format a number of bytes: ``8.2 MB``."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def format_seconds(seconds: float) -> str:
    """Format a time: ``8.2 s``, ``12 min``, ``3.5 h``."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def format_count(count: int) -> str:
    """Format a large number: ``3.4 M``."""
    return _scaled(count, ("", "k", "M", "G", "T")).rstrip()


def format_bits(bits: float | None) -> str:
    """Format bits per weight; a dash for None."""
    return "–" if bits is None else f"{bits:.2f}"


def format_change(value: float, reference: float) -> str:
    """Format the change from a reference: ``+3.1 %``."""
    return f"{100 * (value / reference - 1):+z.1f} %"


def format_perplexity(found: Predictions) -> str:
    """Format a perplexity and that of the original: ``12.10 → 12.51 (+3.4 % ± 0.8 %)``."""
    if found.original is None:
        error = "" if found.error is None else f" ± {found.error:.2f}"
        return f"{found.perplexity:.2f}{error}"
    return f"{found.original:.2f} → {found.perplexity:.2f} ({format_paired_change(found)})"


def format_paired_change(found: Predictions) -> str:
    """Format the change from the original: ``+3.4 % ± 0.8 %``; "" without an original."""
    if found.change is None:
        return ""
    error = "" if found.change_error is None else f" ± {100 * found.change_error:.1f} %"
    return f"{100 * found.change:+z.1f} %{error}"


def _scaled(count: int, units: tuple[str, ...]) -> str:
    value, unit = float(count), units[0]
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = 0 if unit == units[0] or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def as_json(data: Any) -> None:
    """Print data as JSON."""
    import json

    typer.echo(json.dumps(data, indent=2))
