"""The tables that ``quark compare`` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from quark.cli import console
from quark.cli.metrics import show_scores

if TYPE_CHECKING:
    from quark.cli.fitting_table import FittingTable
    from quark.torch.report.comparison import ComparedModel, Comparison

LAYERS = 10  # layers with the largest errors that are printed; the page has all
NATS = 1000  # divergences are printed in thousandths of a nat


def print_comparison(comparison: Comparison, output: Path | None) -> None:
    """Print the figures of all models, their continuations, and the layers with large errors."""
    from quark.torch.evaluation.tasks import Score
    from quark.torch.report.advice import few_windows

    text, rows = comparison.text, _with_short_names(comparison.models)
    console.out.print("", _figure_table(rows))
    console.out.print(
        f"  {text.windows} windows of {text.tokens} tokens: {escape(text.source)}. KL: thousandths "
        "of a nat per token. ± is the standard error.\n",
        style="dim",
    )
    if few := few_windows(text.windows):
        console.say(f"{few}\n")
    if rows[0].speed is not None:
        console.out.print(_speed_table(rows, comparison.runtime), "", sep="\n")
    if rows[0].tasks:
        show_scores(
            {
                row.name: {
                    task: {metric: Score(*score) for metric, score in metrics.items()}
                    for task, metrics in row.tasks.items()
                }
                for row in rows
            }
        )
    if comparison.prompt:
        console.say(f"All models continue: [bold]{escape(_one_line(comparison.prompt))}[/]\n")
        written = {row.name: row.continuation for row in rows}
        console.out.print(
            console.facts(
                {escape(k): escape(_one_line(c.text)) for k, c in written.items() if c is not None}
            )
        )
    if any(row.weight_errors for row in rows):
        console.out.print("", _layer_table(rows))
    if output is not None:
        numbers = output.with_suffix(".json")
        console.say(f"Page: {escape(str(output))}   Numbers: {escape(str(numbers))}")
    console.out.print()


def _with_short_names(rows: list[ComparedModel]) -> list[ComparedModel]:
    """Print a number for each name and return numbered rows, where names do not fit a table."""
    if console.fits(_figure_table(rows)):
        return rows
    numbered = [replace(row, name=str(number)) for number, row in enumerate(rows, start=1)]
    names = {new.name: escape(row.name) for new, row in zip(numbered, rows, strict=True)}
    console.out.print("", console.facts(names))
    return numbered


def _figure_table(rows: list[ComparedModel]) -> FittingTable:
    table = console.table()
    table.add_column("model", no_wrap=True)
    speaks = rows[0].continuation is not None
    for column in ["size", "bits/\nweight", "per-\nplexity"]:
        table.add_column(column, justify="right", no_wrap=True)
    # A narrow terminal shows a standard error below its number, such as 0.25%.
    for column, width in {"change": 8, "KL": 6, "same\ntop-1": 6}.items():
        table.add_column(column, justify="right", min_width=width)
    if speaks:
        table.add_column("tokens\n/s", justify="right", no_wrap=True)
    for row in rows:
        found = row.predictions
        cells = [
            console.format_bytes(row.bytes),
            console.format_bits(row.bits_per_weight),
            f"{found.perplexity:.2f}",
            "" if found.change is None else _with_error(found.change, found.change_error, "+.2%"),
            "" if found.kl is None else _with_error(NATS * found.kl, _times(found.kl_error), ".1f"),
            ""
            if found.agreement is None
            else _with_error(found.agreement, found.agreement_error, ".1%"),
        ]
        if speaks:
            speed = row.continuation and row.continuation.tokens_per_second
            cells.append("" if speed is None else f"{speed:.1f}")
        table.add_row(escape(row.name), *cells)
    return table


def _speed_table(rows: list[ComparedModel], runtime: str) -> FittingTable:
    table = console.table(f"Speed and memory on this machine, one sequence, runtime {runtime}")
    table.add_column("model", no_wrap=True)
    has_device = any(row.speed and row.speed.device_memory is not None for row in rows)
    for column in ["prompt tokens/s", "new tokens/s", "memory", *["GPU memory"] * has_device]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        speed = row.speed
        assert speed is not None
        sizes = [speed.memory, *[speed.device_memory] * has_device]
        table.add_row(
            escape(row.name),
            _with_error(speed.prompt, speed.prompt_error, ".1f"),
            _with_error(speed.new, speed.new_error, ".1f"),
            *("–" if size is None else console.format_bytes(size) for size in sizes),
        )
    return table


def _times(error: float | None) -> float | None:
    return None if error is None else NATS * error


def _with_error(value: float, error: float | None, style: str) -> str:
    shown = f"{value:{style}}"
    return shown if error is None else f"{shown} ± {error:{style.lstrip('+')}}"


def _layer_table(rows: list[ComparedModel]) -> FittingTable:
    """Return the layers with the largest errors of weights, a column for each model."""
    known = [row for row in rows if row.weight_errors]
    worst: dict[str, float] = {}
    for row in known:
        for name, error in row.weight_errors.items():
            worst[name] = max(worst.get(name, 0.0), error or 0.0)
    table = console.table(f"Errors of weights, the {min(LAYERS, len(worst))} largest")
    table.add_column("layer", no_wrap=True)
    for row in known:
        table.add_column(escape(row.name), justify="right")
    for name in sorted(worst, key=lambda name: -worst[name])[:LAYERS]:
        errors = (row.weight_errors.get(name) for row in known)
        cells = ("–" if error is None else f"{error:.2%}" for error in errors)
        table.add_row(escape(name), *cells)
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())
